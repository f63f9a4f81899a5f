"""litellm, through which many applications call whatever server they are given, against a real one."""

from __future__ import annotations

import asyncio
import inspect
import json

import pytest

# What litellm does with pydantic is its own affair.
pytestmark = [
    pytest.mark.model,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Item .* on TypedDict class:UserWarning"),
]

G4 = [{"role": "user", "content": "What is 2+2? Answer with one number."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def litellm():
    """Without the list of prices that it would fetch from the network. It keeps its clients open, with their
    connections, as long as nobody closes them, and so does it with an event loop that it makes where it finds none."""
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        import litellm as module

        asyncio.set_event_loop(runner.get_loop())
        yield module
        for client in module.in_memory_llm_clients_cache.cache_dict.values():
            if not inspect.iscoroutinefunction(client.close):
                client.close()
        runner.run(module.close_litellm_async_clients())


@pytest.fixture
def place(live):
    return {"api_base": f"{live.base_url}/v1", "api_key": "none", "num_retries": 0}


def test_chat(litellm, place):
    answer = litellm.completion(model="hosted_vllm/smol", messages=G4, temperature=0, **place)
    assert answer.choices[0].message.content == "The answer is 4."
    assert answer.usage.completion_tokens == 7


def test_streamed_chat(litellm, place):
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(model="openai/smol", messages=G4, temperature=0, **fields, **place))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "The answer is 4."
    assert chunks[-1].usage.completion_tokens == 7


def test_tools(litellm, place):
    fields = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}
    answer = litellm.completion(model="openai/smol", messages=G4, temperature=0, **fields, **place)
    (call, *_) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Bern", "Rome")


def test_embeddings(litellm, place):
    answer = litellm.embedding(model="openai/smol", input=["one", "two"], **place)
    assert [len(item["embedding"]) for item in answer.data] == [576, 576]


def test_responses(litellm, place):
    answer = litellm.responses(model="openai/smol", input=G4, temperature=0, **place)
    assert answer.output[0].content[0].text == "The answer is 4."


def test_errors_keep_their_status(litellm, place):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(model="openai/smol", messages=G4, temperature=9, **place)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/other", messages=G4, **place)
