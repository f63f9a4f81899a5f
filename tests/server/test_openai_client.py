"""The official client of OpenAI against a real server."""

from __future__ import annotations

from typing import Literal

import openai
import pytest
from pydantic import BaseModel

G1 = "The English alphabet: A B C D E F G"
G4 = [{"role": "user", "content": "What is 2+2? Answer with one number."}]

pytestmark = pytest.mark.model


@pytest.fixture
def client(live):
    with openai.OpenAI(base_url=f"{live.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chat(client):
    answer = client.chat.completions.create(model="smol", messages=G4, temperature=0, logprobs=True, top_logprobs=1)
    assert answer.choices[0].message.content == "The answer is 4."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == 49
    assert answer.usage.prompt_tokens_details.cached_tokens in (0, 32)
    entries = answer.choices[0].logprobs.content
    assert bytes(entries[0].bytes).decode() == entries[0].token == entries[0].top_logprobs[0].token == "The"


def test_streamed_chat(client):
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model="alias", messages=G4, temperature=0, stream=True, stream_options=options
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "The answer is 4."
    assert chunks[-1].usage.completion_tokens == 7
    assert {chunk.model for chunk in chunks} == {"alias"}


@pytest.mark.parametrize("n", [1, 2])
def test_the_stream_helper_rebuilds_the_same_message(client, n):
    """B60."""
    fields = {"model": "smol", "messages": G4, "temperature": 0, "n": n}
    with client.chat.completions.stream(**fields) as stream:
        rebuilt = stream.get_final_completion()
    whole = client.chat.completions.create(**fields)
    assert [c.message.content for c in rebuilt.choices] == [c.message.content for c in whole.choices]
    assert [c.finish_reason for c in rebuilt.choices] == [c.finish_reason for c in whole.choices] == ["stop"] * n
    assert {c.message.role for c in rebuilt.choices} == {"assistant"}


def test_completions(client):
    answer = client.completions.create(model="smol", prompt=G1, max_tokens=12, temperature=0, logprobs=1)
    assert answer.choices[0].text == " H I K L P Q R S T U V Z"
    assert answer.choices[0].logprobs.tokens[0] == " H"
    stream = client.completions.create(model="smol", prompt=[G1, G1], max_tokens=3, temperature=0, stream=True)
    texts = {0: "", 1: ""}
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: " H I K", 1: " H I K"}


def test_extra_fields(client):
    extra = {"top_k": 1, "return_token_ids": True, "structured_outputs": {"choice": ["seven"]}}
    answer = client.chat.completions.create(model="smol", messages=G4, extra_body=extra)
    assert answer.choices[0].message.content == "seven"
    assert len(answer.choices[0].token_ids) == answer.usage.completion_tokens


class Sum(BaseModel):
    left: Literal[1, 2, 3]
    right: Literal[1, 2, 3]
    is_even: bool


def test_structured_output_with_a_pydantic_model(client):
    answer = client.chat.completions.parse(
        model="smol", messages=G4, temperature=0, max_tokens=100, response_format=Sum
    )
    assert isinstance(answer.choices[0].message.parsed, Sum)


def test_errors_are_the_clients_own(client):
    """B62."""
    with pytest.raises(openai.BadRequestError, match="temperature must be a number from 0 to 2") as caught:
        client.chat.completions.create(model="smol", messages=G4, temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="gpt-5", messages=G4)
    with pytest.raises(openai.BadRequestError, match="prompt is empty"):
        client.completions.create(model="smol", prompt="", stream=True)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["smol", "alias"]
    assert client.models.retrieve("alias").owned_by == "llmkit"


@pytest.mark.parametrize("encoding", [openai.omit, "float"])
def test_embeddings(client, live, encoding):
    """The client itself asks for base64 if nothing is said."""
    texts = ["The cat sat on the mat.", "A cat was sitting on a mat.", "Interest rates rose by two percent."]
    answer = client.embeddings.create(model="smol", input=texts, encoding_format=encoding)
    cat, again, money = (item.embedding for item in answer.data)
    assert len(cat) == 576
    assert sum(x * x for x in cat) == pytest.approx(1, abs=1e-5)
    assert sum(x * y for x, y in zip(cat, again, strict=True)) > sum(x * y for x, y in zip(cat, money, strict=True))
    assert answer.usage.prompt_tokens == sum(len(live.llm.tokenizer.encode(text)) for text in texts)
    short = client.embeddings.create(
        model="smol", input=live.llm.tokenizer.encode(texts[0]), dimensions=64, encoding_format=encoding
    )
    (vector,) = (item.embedding for item in short.data)
    length = sum(x * x for x in cat[:64]) ** 0.5
    assert vector == pytest.approx([x / length for x in cat[:64]], abs=1e-5)


def test_a_response(client):
    answer = client.responses.create(model="smol", input=G4, temperature=0, metadata={"a": "b"})
    assert (answer.output_text, answer.status) == ("The answer is 4.", "completed")
    assert (answer.usage.output_tokens, answer.usage.total_tokens) == (7, 49)
    assert client.responses.retrieve(answer.id).output_text == answer.output_text
    (item,) = client.responses.input_items.list(answer.id).data
    assert item.content == G4[0]["content"]
    further = client.responses.create(
        model="smol", input="And 3+3?", previous_response_id=answer.id, temperature=0, max_output_tokens=5
    )
    assert further.usage.input_tokens > answer.usage.total_tokens
    assert further.status == "incomplete"
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.retrieve(answer.id)


def test_a_streamed_response(client):
    events = list(client.responses.create(model="smol", input=G4, temperature=0, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "The answer is 4."
    assert events[-1].type == "response.completed"
    with client.responses.stream(model="smol", input=G4, temperature=0) as stream:
        assert stream.get_final_response().output_text == "The answer is 4."


def test_a_response_parsed_into_a_pydantic_model(client):
    answer = client.responses.parse(model="smol", input=G4, temperature=0, max_output_tokens=100, text_format=Sum)
    assert isinstance(answer.output_parsed, Sum)


def test_a_response_with_tools(client):
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "name": "get_weather", "parameters": parameters, "strict": True}
    fields = {"model": "smol", "tools": [tool], "tool_choice": "required", "temperature": 0, "max_output_tokens": 60}
    answer = client.responses.create(input="Is it sunny in Bern?", **fields)
    call = answer.output[0]
    assert (call.type, call.name) == ("function_call", "get_weather")
    with client.responses.stream(input="Is it sunny in Bern?", **fields) as stream:
        snapshots = [e.snapshot for e in stream if e.type == "response.function_call_arguments.delta"]
    assert snapshots[-1] == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    told = client.responses.create(
        model="smol", input=[result], previous_response_id=answer.id, temperature=0, max_output_tokens=8
    )
    assert told.output_text


def test_a_response_in_the_background(client):
    begun = client.responses.create(model="smol", input="Tell a long story.", background=True, temperature=0)
    assert begun.status == "queued"
    ended = client.responses.cancel(begun.id)
    assert ended.status == "cancelled"
    assert client.responses.retrieve(begun.id).status == "cancelled"
