"""/v1/responses: items in, items out, events in order, and what is stored."""

from __future__ import annotations

import asyncio
import json
import logging
import re

import pytest
from openai.types.responses import Response

from llmkit.testing.answers import TOOLS
from llmkit_server.request_lines import RequestLines

PATH = "/v1/responses"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern", "days": 3.0}}\n</tool_call>'
FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]


@pytest.fixture
def thinking(serve):
    return serve(reasoning_parser="qwen3", tool_parser="hermes")


def ask(served, given="hi", **fields):
    return served.post(PATH, {"input": given, **fields})


def respond(served, given="hi", **fields):
    response = ask(served, given, **fields)
    assert response.status_code == 200, response.text
    Response.model_validate(response.json())
    return response.json()


def read(response):
    """The events of a stream: named as their data say, and numbered."""
    assert response.status_code == 200, response.text
    events = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def prompt_of(served, number=-1):
    return served.llm.tokenizer.decode(served.engine.added[number].prompt_token_ids)


def text_of(body):
    return "".join(part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"])


def test_a_text_is_answered(served):
    body = respond(served, temperature=0.5, metadata={"a": "b"}, instructions="Be kind.", max_output_tokens=100)
    assert (body["object"], body["status"], text_of(body)) == ("response", "completed", "Hello")
    assert body["id"].startswith("resp_")
    assert (body["temperature"], body["metadata"], body["max_output_tokens"]) == (0.5, {"a": "b"}, 100)
    assert body["usage"]["output_tokens"] == 6
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + 6
    assert prompt_of(served) == "[system]Be kind.[user]hi[assistant]"


@pytest.mark.parametrize(("stream", "background"), [(False, False), (True, False), (False, True)])
def test_the_log_has_the_id_of_the_response_and_that_of_the_request(served, caplog, stream, background):
    served.llm.on_request_ended.append(RequestLines(show_prompt=False))
    body = {"input": "hi", "stream": stream, "background": background}
    with caplog.at_level(logging.INFO, logger="llmkit.server.requests"):
        response = served.post("/v1/responses", body, headers={"x-request-id": "mine"})
    response_id = re.search(r'"id": ?"(resp_\w+)"', response.text)[1]
    assert response.headers["x-request-id"] == "mine"
    assert served.engine.added[0].request_id.startswith(f"{response_id}-mine")
    if not background:
        assert f"{response_id}-mine: stop" in caplog.text


def test_items_are_messages(served):
    given = [
        {"role": "developer", "content": "Rule"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
        {"role": "user", "content": "d"},
    ]
    respond(served, given)
    assert prompt_of(served) == "[system]Rule[user]a[assistant]b[tool]42[user]d[assistant]"


def test_an_answer_that_is_cut_off_is_incomplete(served):
    body = respond(served, max_output_tokens=3)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    *_, last = read(ask(served, max_output_tokens=3, stream=True))
    assert last["type"] == "response.incomplete"


def test_reasoning_text_and_calls_are_items(thinking):
    thinking.engine.answers = [f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"]
    body = respond(thinking, tools=FLAT_TOOLS)
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, call, other = body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "Let me see."
    assert json.loads(call["arguments"]) == {"city": "Bern", "days": 3.0}
    assert call["call_id"] != other["call_id"]
    assert {item["status"] for item in body["output"]} == {"completed"}
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] == 3
    assert body["tools"][0]["name"] == "get_weather"


def test_the_events_of_a_stream(thinking):
    thinking.engine.answers = [f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}"]
    events = read(ask(thinking, tools=FLAT_TOOLS, stream=True))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert [kind for i, kind in enumerate(kinds[2:]) if kind != kinds[2:][i - 1]] == [
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    final = events[-1]["response"]
    assert [event["item"] for event in events if event["type"].endswith("item.done")] == final["output"]
    for index, item in enumerate(final["output"]):
        deltas = [event["delta"] for event in events if "delta" in event and event["output_index"] == index]
        assert "".join(deltas) == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
    added = next(event for event in events if event["type"].endswith("item.added"))
    assert (added["item"]["content"], added["item"]["status"]) == ([], "in_progress")
    assert events[0]["response"]["output"] == []


def test_whole_and_streamed_answers_are_the_same(thinking):
    thinking.engine.answers = [f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}"]
    whole = respond(thinking, tools=FLAT_TOOLS)
    streamed = read(ask(thinking, tools=FLAT_TOOLS, stream=True))[-1]["response"]
    varying = {"id", "created_at", "completed_at", "output"}
    assert {k: v for k, v in whole.items() if k not in varying} == {
        k: v for k, v in streamed.items() if k not in varying
    }
    drop = {"id", "call_id"}
    items = [[{k: v for k, v in item.items() if k not in drop} for item in one["output"]] for one in (whole, streamed)]
    assert items[0] == items[1]


def test_tool_choices(thinking):
    thinking.engine.answers = [CALL]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "noop"}]}
    for choice in ({"type": "function", "name": "noop"}, allowed):
        body = respond(thinking, tools=FLAT_TOOLS, tool_choice=choice)
        assert body["tool_choice"] == choice
        tag = thinking.engine.added[-1].grammar.request.source
        assert '\\"noop\\"' in tag
        assert '\\"search\\"' not in tag


def test_a_schema_is_a_constraint(served):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    assert respond(served, text={"format": form})["text"] == {"format": form}
    assert json.loads(served.engine.added[0].grammar.request.source) == schema


def test_log_probabilities_are_with_the_text(served):
    body = respond(served, include=["message.output_text.logprobs"], top_logprobs=1)
    entries = body["output"][0]["content"][0]["logprobs"]
    assert [entry["logprob"] for entry in entries] == [-0.5] * len(entries)
    assert len(entries) == 5  # the end is no text
    events = read(ask(served, top_logprobs=1, stream=True))
    streamed = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    assert streamed == entries


def test_a_conversation_goes_on(thinking):
    thinking.engine.answers = [CALL]
    first = respond(thinking, tools=FLAT_TOOLS, instructions="Be brief.")
    result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "sunny"}
    thinking.engine.answers = ["Nice."]
    second = respond(thinking, [result], previous_response_id=first["id"])
    assert prompt_of(thinking) == "[user]hi[assistant][tool]sunny[assistant]"
    respond(thinking, "And now?", previous_response_id=second["id"])
    assert prompt_of(thinking) == "[user]hi[assistant][tool]sunny[assistant]Nice.[user]And now?[assistant]"


def test_what_is_stored_can_be_asked_for_and_forgotten(served, refusal):
    body = respond(served, metadata={"k": "v"})
    path = f"{PATH}/{body['id']}"
    assert served.call("GET", path).json() == body
    assert served.call("DELETE", path).json() == {"id": body["id"], "object": "response", "deleted": True}
    for method, where in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel"), ("GET", f"{path}/input_items")):
        assert "not stored" in refusal(served.call(method, where), 404, "response_id")
    refusal(ask(served, previous_response_id=body["id"]), 404, "previous_response_id")
    assert served.context.responses.num_bytes == 0


def test_a_stream_is_stored_when_its_last_event_goes_out(served):
    final = read(ask(served, stream=True))[-1]["response"]
    assert served.call("GET", f"{PATH}/{final['id']}").json() == final


def test_what_is_not_to_be_stored_is_not(served, refusal):
    body = respond(served, store=False)
    refusal(served.call("GET", f"{PATH}/{body['id']}"), 404, "response_id")
    assert len(served.context.responses) == 0


def test_the_store_is_bounded_by_number_and_bytes(serve, refusal):
    served = serve(max_stored_responses=2)
    first, second, third = (respond(served)["id"] for _ in range(3))
    refusal(served.call("GET", f"{PATH}/{first}"), 404, "response_id")
    assert served.call("GET", f"{PATH}/{second}").status_code == 200
    fourth = respond(served)["id"]  # the second was asked for, so the third goes
    refusal(served.call("GET", f"{PATH}/{third}"), 404, "response_id")
    assert served.call("GET", f"{PATH}/{fourth}").status_code == 200
    small = serve(max_stored_response_bytes=4000)
    for _ in range(10):
        respond(small, "x" * 100)
        assert 0 < small.context.responses.num_bytes <= 4000
    respond(small, [{"role": "user", "content": "x"}] * 60)
    assert len(small.context.responses) == 0


def test_responses_belong_to_a_key(serve, refusal):
    served = serve(api_keys=("one", "two"))
    mine, other = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    body = served.post(PATH, {"input": "hi"}, headers=mine).json()
    path = f"{PATH}/{body['id']}"
    assert served.call("GET", path, headers=mine).status_code == 200
    refusal(served.call("GET", path, headers=other), 404, "response_id")
    refusal(served.call("DELETE", path, headers=other), 404, "response_id")
    given = {"input": "hi", "previous_response_id": body["id"]}
    refusal(served.post(PATH, given, headers=other), 404, "previous_response_id")


def test_input_items_come_in_pages(served):
    first = respond(served, [{"role": "user", "content": str(i)} for i in range(5)])
    second = respond(served, "more", previous_response_id=first["id"])
    path = f"{PATH}/{second['id']}/input_items"
    items = served.call("GET", path, params={"order": "asc"}).json()
    assert len(items["data"]) == 7
    assert items["data"][5]["role"] == "assistant"
    page = served.call("GET", path, params={"limit": 3}).json()
    assert page["has_more"]
    rest = served.call("GET", path, params={"after": page["last_id"]}).json()
    assert [item["id"] for item in page["data"] + rest["data"]] == [item["id"] for item in items["data"][::-1]]
    assert not rest["has_more"]


async def until_done(client, path):
    while (body := (await client.get(path)).json())["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0)
    return body


def test_a_response_in_the_background(served):
    async def use(client):
        begun = (await client.post(PATH, json={"input": "hi", "background": True})).json()
        return begun, await until_done(client, f"{PATH}/{begun['id']}")

    begun, done = served.run(use)
    assert (begun["status"], begun["output"], begun["background"]) == ("queued", [], True)
    assert (done["status"], text_of(done)) == ("completed", "Hello")
    assert served.context.admission.num_sequences == 0


def test_a_background_response_is_cancelled(served):
    served.engine.hold = True

    async def use(client):
        begun = (await client.post(PATH, json={"input": "hi", "background": True})).json()
        path = f"{PATH}/{begun['id']}"
        cancelled = (await client.post(f"{path}/cancel")).json()
        again = (await client.post(f"{path}/cancel")).json()
        going_on = await client.post(PATH, json={"input": "hi", "previous_response_id": begun["id"]})
        return cancelled, again, (await client.get(path)).json(), going_on

    cancelled, again, found, going_on = served.run(use)
    assert cancelled["status"] == "cancelled"
    assert cancelled == again == found
    assert going_on.json()["error"]["param"] == "previous_response_id"
    assert served.context.admission.num_sequences == 0
    assert served.llm.num_unfinished == 0


def test_a_background_response_that_is_deleted_ends(served):
    served.engine.hold = True

    async def use(client):
        begun = (await client.post(PATH, json={"input": "hi", "background": True})).json()
        await client.delete(f"{PATH}/{begun['id']}")

    served.run(use)
    assert (len(served.context.responses), served.context.responses.num_bytes) == (0, 0)
    assert served.llm.num_unfinished == 0
    assert served.context.admission.num_sequences == 0


def test_a_background_stream_can_be_read_again(served):
    async def use(client):
        whole = await client.post(PATH, json={"input": "hi", "background": True, "stream": True})
        response_id = read(whole)[0]["response"]["id"]
        again = await client.get(f"{PATH}/{response_id}", params={"stream": True})
        rest = await client.get(f"{PATH}/{response_id}", params={"stream": True, "starting_after": 4})
        return whole, again, rest

    whole, again, rest = served.run(use)
    assert again.text == whole.text
    assert [event["type"] for event in read(whole)][:3] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert whole.text.endswith(rest.text)
    assert '"sequence_number":5' in rest.text.split("\n\n")[0]


def test_a_background_stream_goes_on_without_its_reader(served):
    served.engine.answers = ["x" * 100]

    async def use(client):
        async def gone():
            while not served.engine.added:
                await asyncio.sleep(0)

        async def ignore(message):
            del message

        await served.asgi_call("POST", PATH, {"input": "hi", "background": True, "stream": True}, ignore, gone)
        (response_id,) = served.context.responses._stored
        return await until_done(client, f"{PATH}/{response_id}")

    assert text_of(served.run(use)) == "x" * 100


def test_only_background_responses_are_cancelled_or_streamed_again(served, refusal):
    path = f"{PATH}/{respond(served)['id']}"
    refusal(served.call("POST", f"{path}/cancel"), 400, "response_id")
    refusal(served.call("GET", path, params={"stream": True}), 400, "stream")


def test_failures(served, refusal):
    served.engine.fail_after = 2
    assert refusal(ask(served), 500, None) == "the step broke"
    *_, last = read(ask(served, stream=True))
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the step broke", "param": None}
    assert served.call("GET", f"{PATH}/{last['response']['id']}").json() == last["response"]
    assert served.context.admission.num_sequences == 0


def test_a_background_response_that_the_engine_refuses(served):
    served.engine.refuse = ("structured_outputs cannot be met.", "structured_outputs")

    async def use(client):
        begun = (await client.post(PATH, json={"input": "hi", "background": True})).json()
        return await until_done(client, f"{PATH}/{begun['id']}")

    body = served.run(use)
    assert (body["status"], body["error"]["code"], body["error"]["param"]) == ("failed", "invalid_prompt", "text")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_response(served, stream):
    served.engine.answers = ["x" * 300]

    async def gone():
        while not served.engine.added:
            await asyncio.sleep(0)

    served.asgi("POST", PATH, {"input": "hi", "stream": stream}, gone=gone)
    assert len(served.engine.aborted) == 1
    assert served.context.admission.num_sequences == 0
    assert len(served.context.responses) == 0


def test_truncation_leaves_out_the_oldest_turns(served, refusal):
    turns = [{"role": role, "content": f"{i}{role[0] * 60}"} for i in range(10) for role in ("user", "assistant")]
    given = [{"role": "system", "content": "S"}, *turns, {"role": "user", "content": "last"}]
    refusal(ask(served, given), 400, "input")
    body = respond(served, given, truncation="auto", max_output_tokens=50)
    assert body["truncation"] == "auto"
    prompt = prompt_of(served)
    assert prompt.startswith("[system]S[user]")
    assert prompt.endswith("[user]last[assistant]")
    assert 512 - 200 < len(served.engine.added[-1].prompt_token_ids) <= 462
    refusal(ask(served, "x" * 600, truncation="auto"), 400, "input")


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"input": None}, "input", 400),
        ({"input": ""}, "input", 400),
        ({"input": []}, "input", 400),
        ({"input": 5}, "input", 400),
        ({"input": [5]}, "input", 400),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input", 400),
        ({"input": [{"role": "user", "content": 5}]}, "input", 400),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", 501),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", 501),
        ({"input": [{"type": ["message"]}]}, "input", 400),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input", 400),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "c", "arguments": "{"}]}, "input", 400),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input", 400),
        ({"input": [{"type": "reasoning", "content": "x"}]}, "input", 400),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", 400),
        ({"input": [{"role": "user", "content": "x"}] * 5000}, "input", 400),
        ({"input": "x" * 2000}, "input", 400),
        ({"instructions": 5}, "instructions", 400),
        ({"previous_response_id": 5}, "previous_response_id", 400),
        ({"previous_response_id": "resp_1"}, "previous_response_id", 404),
        ({"max_output_tokens": 0}, "max_output_tokens", 400),
        ({"max_output_tokens": "many"}, "max_output_tokens", 400),
        ({"max_tool_calls": 0}, "max_tool_calls", 400),
        ({"temperature": 3}, "temperature", 400),
        ({"top_p": 0}, "top_p", 400),
        ({"top_logprobs": 21}, "top_logprobs", 400),
        ({"top_logprobs": "x"}, "top_logprobs", 400),
        ({"text": 5}, "text", 400),
        ({"text": {"format": 5}}, "text", 400),
        ({"text": {"format": {"type": "xml"}}}, "text", 400),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", 400),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 5}}}, "text", 400),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "nope"}}}}, "text", 400),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", 400),
        ({"tools": 5}, "tools", 400),
        ({"tools": [5]}, "tools", 400),
        ({"tools": [{"type": "web_search"}]}, "tools", 501),
        ({"tools": [{"type": "function"}]}, "tools", 400),
        ({"tool_choice": "sometimes"}, "tool_choice", 400),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", 501),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", 400),
        ({"reasoning": 5}, "reasoning", 400),
        ({"reasoning": {"effort": 5}}, "reasoning", 400),
        ({"include": "all"}, "include", 400),
        ({"include": [{}]}, "include", 400),
        ({"metadata": {"a": 1}}, "metadata", 400),
        ({"metadata": {"a" * 65: "x"}}, "metadata", 400),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", 400),
        ({"truncation": "some"}, "truncation", 400),
        ({"stream_options": {}}, "stream_options", 400),
        ({"background": True, "store": False}, "store", 400),
        ({"store": "yes"}, "store", 400),
        ({"n": 2}, "n", 400),
        ({"messages": []}, "messages", 400),
        ({"conversation": "conv_1"}, "conversation", 501),
        ({"prompt": {"id": "x"}}, "prompt", 501),
        ({"model": "other"}, "model", 404),
    ],
    ids=lambda value: json.dumps(value)[:48] if isinstance(value, dict) else str(value),
)
@pytest.mark.parametrize("mode", [{}, {"stream": True}, {"background": True}], ids=["whole", "stream", "background"])
def test_bad_fields_are_named(served, refusal, fields, param, status, mode):
    if "stream_options" in fields and "stream" in mode:
        mode = {}
    refusal(served.post(PATH, {"input": "hi", **mode, **fields}), status, param)
    assert served.llm.num_unfinished == 0
    assert served.context.admission.num_sequences == 0


def test_bad_queries_are_named(served, refusal):
    path = f"{PATH}/{respond(served)['id']}"
    refusal(served.call("GET", path, params={"stream": "maybe"}), 400, "stream")
    refusal(served.call("GET", path, params={"starting_after": "x"}), 400, "starting_after")
    for query, param in (({"limit": 0}, "limit"), ({"limit": 101}, "limit"), ({"order": "up"}, "order")):
        refusal(served.call("GET", f"{path}/input_items", params=query), 400, param)
    refusal(served.call("GET", f"{path}/input_items", params={"after": "nothing"}), 400, "after")


def test_fields_that_nothing_reads_are_named(served):
    response = ask(served, seed=3, top_k=2, foo=1, service_tier="auto", prompt_cache_key="k", safety_identifier="u")
    assert response.headers["x-llmkit-unknown-fields"] == "foo"
    assert served.engine.added[0].sampling_params.top_k == 2
    assert served.engine.added[0].user == "u"
