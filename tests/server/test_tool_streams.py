"""Tool calls in chats: a stream makes the same message as the whole answer, whatever was asked for."""

from __future__ import annotations

import json

import pytest

TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
    for name in ("weather", "time")
]
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {"city": "Rome"}}\n</tool_call>'
)


@pytest.fixture
def tooled(serve):
    served = serve(tool_parser="hermes", reasoning_parser="qwen3")
    served.engine.answers = [CALLS]
    return served


def rebuilt(chunks, index=0):
    """The message that a client makes of chunks, and its finish reason."""
    message, calls, reason = {"content": "", "reasoning": ""}, [], None
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            reason = choice["finish_reason"] or reason
            for field in message:
                message[field] += choice["delta"].get(field) or ""
            for call in choice["delta"].get("tool_calls", ()):
                if call["index"] == len(calls):
                    assert call["id"].startswith("call_")
                    assert call["type"] == "function"
                    calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                else:
                    assert set(call) == {"index", "function"}
                    assert set(call["function"]) == {"arguments"}
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return message, calls, reason


def whole(response):
    (choice,) = response.json()["choices"]
    message = choice["message"]
    calls = [
        {"id": call["id"], "name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in message.get("tool_calls", ())
    ]
    return (
        {"content": message["content"] or "", "reasoning": message.get("reasoning", "")},
        calls,
        choice["finish_reason"],
    )


@pytest.fixture
def ask(tooled, events):
    """Message, calls and finish reason, the same whole and streamed."""

    def run(**fields):
        fields = {"max_tokens": 400} | fields
        streamed = rebuilt(events(tooled.chat(stream=True, **fields)))
        full = whole(tooled.chat(**fields))
        for message in (streamed, full):
            for call in message[1]:
                assert len(call.pop("id")) > 20
        assert streamed == full
        return full

    return run


@pytest.mark.parametrize("choice", [None, "auto", "required"])
def test_calls_of_the_models_own_choice(ask, choice):
    message, calls, reason = ask(tools=TOOLS, tool_choice=choice)
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("weather", {"city": "Oslo"}),
        ("time", {"city": "Rome"}),
    ]
    assert message["content"].strip() == ""
    assert reason == "tool_calls"


def test_a_named_tool_ends_with_stop(ask):
    _, calls, reason = ask(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}})
    assert calls[0]["name"] == "weather"
    assert reason == "stop"


@pytest.mark.parametrize(
    "fields", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}, {"tool_choice": "auto"}]
)
def test_without_tools_nothing_is_read_as_a_call(ask, tooled, fields):
    message, calls, reason = ask(**fields)
    assert (message["content"], calls, reason) == (CALLS, [], "stop")
    assert "[tools]" not in bytes(tooled.engine.added[-1].prompt_token_ids[:60]).decode(errors="replace")


def test_an_answer_without_calls(ask, tooled):
    tooled.engine.answers = ["No call is needed: 3 < 4."]
    assert ask(tools=TOOLS) == ({"content": "No call is needed: 3 < 4.", "reasoning": ""}, [], "stop")


def test_a_call_that_is_cut_off_says_length(ask):
    _, calls, reason = ask(tools=TOOLS, max_tokens=40)
    assert calls[0]["name"] == "weather"
    assert reason == "length"


def test_reasoning_is_apart_from_content(ask, tooled):
    tooled.engine.answers = ["<think>\nI must think.\n</think>\n\nFour."]
    assert ask() == ({"content": "Four.", "reasoning": "I must think."}, [], "stop")
    assert ask(include_reasoning=False) == ({"content": "Four.", "reasoning": ""}, [], "stop")
    tooled.engine.answers = ["<think>\nCall it.\n</think>\n\n" + CALLS]
    message, calls, reason = ask(tools=TOOLS)
    assert (message["reasoning"], len(calls), reason) == ("Call it.", 2, "tool_calls")


def test_two_forms_at_once_are_refused(tooled, refusal):
    form = {"type": "json_object"}
    refusal(tooled.chat(tools=TOOLS, tool_choice="required", response_format=form), 400, "tool_choice")
