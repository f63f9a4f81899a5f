"""/v1/messages with Anthropic's own client, over a scripted engine."""

from __future__ import annotations

import json

import anthropic
import httpx
import httpx2
import pytest

from llmkit.testing.answers import TOOLS as OPENAI_TOOLS
from llmkit_server.anthropic_writer import UNREADABLE, read_input

HI = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"name": "get_weather", "description": "d", "input_schema": OPENAI_TOOLS[0]["function"]["parameters"]},
    {"name": "noop", "input_schema": {"type": "object", "properties": {}}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>'


@pytest.fixture
def ask():
    """Runs `use(client)` with the client of the server given, in one event loop."""

    def run(served, use):
        async def main(_):
            http_client = httpx2.AsyncClient(transport=httpx2.ASGITransport(served.app), base_url="http://server")
            async with anthropic.AsyncAnthropic(
                api_key="none", base_url="http://server", http_client=http_client, max_retries=0
            ) as client:
                return await use(client)

        return served.run(main)

    return run


def create(ask, served, messages=HI, max_tokens=200, **fields):
    fields |= {"model": "models/tiny", "messages": messages, "max_tokens": max_tokens}
    return ask(served, lambda client: client.messages.create(**fields))


def prompt_of(served):
    return served.llm.tokenizer.decode(served.engine.added[-1].prompt_token_ids, skip_special_tokens=False)


def test_a_message(ask, served):
    message = create(ask, served, system="Be brief.", extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 5})
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Hello", "citations": None}]
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    assert message.id.startswith("msg_")
    assert prompt_of(served) == "[system]Be brief.[user]hi[assistant]"
    assert message.usage.input_tokens == len(served.engine.added[0].prompt_token_ids)
    assert message.usage.output_tokens == 6
    params = served.engine.added[0].sampling_params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 5)


def test_stop_reasons(ask, served):
    message = create(ask, served, max_tokens=2)
    assert (message.content[0].text, message.stop_reason) == ("He", "max_tokens")
    message = create(ask, served, stop_sequences=["l", "x"])
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("He", "stop_sequence", "l")


def test_conversations(ask, served):
    """Blocks of every kind that a text model can read."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "c"},
                {"type": "tool_use", "id": "t1", "name": "noop", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "r"}]},
                {"type": "tool_result", "tool_use_id": "t1", "content": "no", "is_error": True},
                {"type": "text", "text": "d"},
            ],
        },
        {"role": "assistant", "content": "e"},
    ]
    message = create(
        ask, served, messages, system=[{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]
    )
    assert prompt_of(served) == "[system]s[user]a\nb[assistant]c[tool]r[tool]Error: no[user]d[assistant]e"
    assert message.content[0].text == "Hello"


def test_tools(ask, serve):
    served = serve(tool_parser="hermes")
    served.engine.answers = [f"Let me see.\n{CALL}"]
    message = create(ask, served, tools=TOOLS)
    text, call = message.content
    assert text.text == "Let me see."
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Zürich", "days": 3})
    assert message.stop_reason == "tool_use"
    assert "[tools]" in prompt_of(served)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "any"}, ["get_weather", "noop"]),
        ({"type": "tool", "name": "noop"}, ["noop"]),
        ({"type": "auto"}, None),
    ],
)
def test_tool_choices(ask, serve, choice, names):
    served = serve(tool_parser="hermes")
    create(ask, served, tools=TOOLS, tool_choice=choice)
    grammar = served.engine.added[0].grammar
    if names is None:
        assert grammar is None
    else:
        assert [name for name in ("get_weather", "noop") if f'\\"{name}\\"' in grammar.request.source] == names
    create(ask, served, tools=TOOLS, tool_choice={"type": "none"})
    assert "[tools]" not in prompt_of(served)


def test_one_call_at_most(ask, serve):
    served = serve(tool_parser="hermes")
    served.engine.answers = [CALL + CALL]
    message = create(ask, served, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert len(message.content) == 1


def test_thinking(ask, serve):
    served = serve(reasoning_parser="qwen3")
    served.engine.answers = ["<think>\nHm.\n</think>\n\nYes."]
    message = create(ask, served)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[1].text) == ("Hm.", "Yes.")
    message = create(ask, served, thinking={"type": "disabled"})
    assert [block.type for block in message.content] == ["text"]


@pytest.mark.parametrize(
    "answer", ["Hello", f"<think>Hm.</think>Let me see.\n{CALL}\n{CALL}", f"{CALL}\nDone.", "<think>On and on", CALL]
)
def test_the_stream_helper_rebuilds_the_same_message(ask, serve, answer):
    served = serve(reasoning_parser="qwen3", tool_parser="hermes")
    served.engine.answers = [answer]
    fields = {"model": "models/tiny", "messages": HI, "max_tokens": 200, "tools": TOOLS}

    async def stream(client):
        async with client.messages.stream(**fields) as events:
            names = [event.type async for event in events]
            return names, await events.get_final_message()

    names, rebuilt = ask(served, stream)
    whole = ask(served, lambda client: client.messages.create(**fields))
    assert names[0] == "message_start"
    assert names[-1] == "message_stop"
    assert names.count("content_block_start") == names.count("content_block_stop")

    def shown(message):
        return sorted((block.model_dump(exclude={"id", "parsed_output"}) for block in message.content), key=str)

    if answer.endswith("Done."):
        assert [block.type for block in rebuilt.content] == ["tool_use", "text"]
    assert shown(rebuilt) == shown(whole)
    assert rebuilt.stop_reason == whole.stop_reason
    assert rebuilt.usage.output_tokens == whole.usage.output_tokens
    assert rebuilt.usage.input_tokens == whole.usage.input_tokens


def test_the_events_of_a_stream(serve):
    """Names and data as they go over the wire."""
    served = serve()
    served.engine.answers = ["Hi"]
    body = {"messages": HI, "max_tokens": 10, "stream": True}
    response = served.post("/v1/messages", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [block.split("\n") for block in response.text.removesuffix("\n\n").split("\n\n")]
    data = [json.loads(line[len("data: ") :]) for _, line in events]
    assert [f"event: {one['type']}" for one in data] == [name for name, _ in events]
    assert [one["type"] for one in data] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert data[0]["message"]["content"] == []
    assert data[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert data[-2]["usage"]["output_tokens"] == 3


def test_an_error_in_mid_stream_is_an_event(ask, served):
    served.engine.fail_after = 2

    async def stream(client):
        async for _ in await client.messages.create(model="models/tiny", messages=HI, max_tokens=9, stream=True):
            pass

    with pytest.raises(anthropic.APIStatusError, match="the step broke"):
        ask(served, stream)


def test_counting_tokens(ask, served):
    fields = {"model": "models/tiny", "messages": HI, "system": "s"}
    counted = ask(served, lambda client: client.messages.count_tokens(**fields))
    assert counted.input_tokens == create(ask, served, system="s").usage.input_tokens


def test_a_schema_for_the_answer(ask, served):
    config = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    create(ask, served, extra_body={"output_config": config})
    assert json.loads(served.engine.added[0].grammar.request.source) == {"type": "object"}


def test_fields_of_llmkit(ask, served):
    create(ask, served, extra_body={"seed": 7, "min_p": 0.1, "priority": 2}, metadata={"user_id": "u"})
    request = served.engine.added[0]
    assert (request.sampling_params.seed, request.sampling_params.min_p, request.priority) == (7, 0.1, 2)
    response = served.post("/v1/messages", {"messages": HI, "max_tokens": 5, "foo": 1})
    assert response.headers["x-llmkit-unknown-fields"] == "foo"


def body(**changes):
    return {"messages": HI, "max_tokens": 5} | changes


def user(content):
    return body(messages=[{"role": "user", "content": content}])


BAD = [
    (body(max_tokens=None), "max_tokens"),
    (body(max_tokens="5"), "max_tokens"),
    (body(max_tokens=0), "max_tokens"),
    (body(temperature=9), "temperature"),
    (body(stop_sequences=5), "stop_sequences"),
    (body(stop_sequences=[""]), "stop_sequences"),
    (body(system=5), "system"),
    (body(system=[{"type": "image"}]), "system"),
    (body(messages=5), "messages"),
    (body(messages=[]), "messages"),
    (body(messages=[5]), "messages"),
    (body(messages=[{"role": "tool", "content": "x"}]), "messages"),
    (user(5), "messages"),
    (user([5]), "messages"),
    (user([{"type": "image", "source": {}}]), "messages"),
    (user([{"type": "text"}]), "messages"),
    (user([{"type": "tool_result"}]), "messages"),
    (user([{"type": "tool_use", "id": "a", "name": "b", "input": {}}]), "messages"),
    (user("x" * 5000), "messages"),
    (body(messages=[{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]), "messages"),
    (body(tools=5), "tools"),
    (body(tools=[5]), "tools"),
    (body(tools=[{"name": "f"}]), "tools"),
    (body(tools=[{"type": "bash_20250124", "name": "bash"}]), "tools"),
    (body(tool_choice="any"), "tool_choice"),
    (body(tool_choice={"type": "required"}), "tool_choice"),
    (body(tool_choice={"type": "any", "disable_parallel_tool_use": 1}), "tool_choice"),
    (body(tool_choice={"type": "tool", "name": "x"}), "tool_choice"),
    (body(thinking=True), "thinking"),
    (body(metadata=5), "metadata"),
    (body(metadata={"user_id": 5}), "metadata"),
    (body(output_config={"format": {"type": "xml"}}), "output_config"),
    (body(output_config={"format": {"type": "json_schema", "schema": {"type": "no"}}}), "output_config"),
    (body(n=2), "n"),
    (body(logprobs=True), "logprobs"),
    (body(stream="yes"), "stream"),
]


@pytest.mark.parametrize(("given", "field"), BAD, ids=lambda value: str(value)[:70])
@pytest.mark.parametrize("streams", [False, True])
def test_errors_have_anthropics_shape(served, given, field, streams):
    given = given if "stream" in given else given | {"stream": streams}
    response = served.post("/v1/messages", given)
    assert response.status_code in (400, 501), response.text
    error = response.json()
    assert set(error) == {"type", "error", "request_id"}
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert field in error["error"]["message"]
    assert response.headers["request-id"] == error["request_id"]


def test_errors_of_every_layer(serve):
    served = serve(api_keys=("secret",), max_body_bytes=2000)
    headers = {"x-api-key": "secret"}

    def error(status, kind, response):
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)

    error(401, "authentication_error", served.post("/v1/messages", body()))
    error(401, "authentication_error", served.post("/v1/messages", body(), headers={"x-api-key": "no"}))
    assert served.post("/v1/messages", body(), headers=headers).status_code == 200
    error(413, "request_too_large", served.post("/v1/messages", user("x" * 3000), headers=headers))
    error(404, "not_found_error", served.post("/v1/messages", body(model="none"), headers=headers))
    error(404, "not_found_error", served.post("/v1/messages/nothing", body(), headers=headers))
    error(405, "invalid_request_error", served.call("GET", "/v1/messages", headers=headers))
    error(400, "invalid_request_error", served.call("POST", "/v1/messages", content=b"{", headers=headers | JSON))
    openai = served.post("/v1/chat/completions", {"messages": 5}, headers=headers)
    assert openai.json()["error"]["param"] == "messages"


JSON = {"content-type": "application/json"}


def test_the_client_raises_its_own_errors(ask, served):
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as found:
        ask(served, lambda c: c.messages.create(model="none", messages=HI, max_tokens=5))
    assert found.value.request_id


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        ("{", {}),
        ('{"a": [1, "b', {"a": [1, "b"]}),
        ('{"a": 1}', {"a": 1}),
        ("{'a': 1}", {UNREADABLE: "{'a': 1}"}),
        ("[1]", {UNREADABLE: "[1]"}),
        ('{"a": NaN}', {UNREADABLE: '{"a": NaN}'}),
    ],
)
def test_arguments_as_input(arguments, expected):
    assert read_input(arguments) == expected


@pytest.mark.model
def test_a_real_model(live):
    with anthropic.Anthropic(api_key="none", base_url=live.base_url, max_retries=0) as client:
        fields = {"model": "smol", "max_tokens": 20, "extra_body": {"temperature": 0}}
        question = [{"role": "user", "content": "What is 2+2? Answer with one number."}]
        message = client.messages.create(messages=question, **fields)
        assert message.content[0].text == "The answer is 4."
        assert message.stop_reason == "end_turn"
        assert message.usage.input_tokens + message.usage.cache_read_input_tokens == 42
        with client.messages.stream(messages=question, **fields) as stream:
            assert "".join(stream.text_stream) == "The answer is 4."
        assert client.messages.count_tokens(model="smol", messages=question).input_tokens == 42
        response = httpx.post(f"{live.base_url}/v1/messages", json={})
        assert response.json()["type"] == "error"
