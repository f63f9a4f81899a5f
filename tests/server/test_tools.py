"""Tools and reasoning in chats: what the model writes as text arrives as calls, thoughts and content."""

from __future__ import annotations

import json

import pytest

from llmkit.frontend.chat_template import ChatTemplate
from llmkit.testing.answers import TOOLS
from llmkit_server.app import server_context

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich }", "days": 3.0}}\n</tool_call>'
ARGUMENTS = '{"city": "Zürich }", "days": 3.0}'


@pytest.fixture
def hermes(serve):
    return serve(tool_parser="hermes")


def message_of(response):
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["message"], choice["finish_reason"]


def test_calls_are_told_as_calls(hermes):
    hermes.engine.answers = [f"Let me see.\n{CALL}\n{CALL}"]
    message, reason = message_of(hermes.chat(tools=TOOLS))
    assert reason == "tool_calls"
    assert message["content"] == "Let me see."
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "get_weather", "arguments": ARGUMENTS}] * 2
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert "[tools]" in hermes.llm.tokenizer.decode(hermes.engine.added[0].prompt_token_ids)


def test_a_stream_tells_the_same(hermes, events):
    hermes.engine.answers = [f"Let me see.\n{CALL}\n{CALL}"]
    chunks = events(hermes.chat(tools=TOOLS, stream=True))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."
    pieces = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    for index in (0, 1):
        first, *others = [piece for piece in pieces if piece["index"] == index]
        assert first["function"]["name"] == "get_weather"
        assert first["id"].startswith("call_")
        assert all(piece.get("id") is None for piece in others)
        assert "".join(piece["function"]["arguments"] for piece in (first, *others)) == ARGUMENTS
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_that_is_cut_off_has_its_arguments_so_far(hermes):
    hermes.engine.answers = [CALL]
    message, reason = message_of(hermes.chat(tools=TOOLS, max_tokens=70))
    assert reason == "length"
    (call,) = message["tool_calls"]
    arguments = call["function"]["arguments"]
    assert 0 < len(arguments) < len(ARGUMENTS)
    assert ARGUMENTS.startswith(arguments)


def test_a_text_that_is_no_call_is_content(hermes):
    hermes.engine.answers = ["<tool_call>nothing</tool_call>\n"]
    message, reason = message_of(hermes.chat(tools=TOOLS))
    assert (message["content"], message.get("tool_calls"), reason) == (hermes.engine.answers[0], None, "stop")


def test_without_parallel_calls_there_is_one(hermes):
    hermes.engine.answers = [CALL + CALL]
    message, _ = message_of(hermes.chat(tools=TOOLS, parallel_tool_calls=False))
    assert len(message["tool_calls"]) == 1
    tag = json.loads(hermes.engine.added[0].grammar.request.source)
    assert tag["format"]["stop_after_first"] is True


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", ["get_weather", "search", "noop"]), ({"type": "function", "function": {"name": "noop"}}, ["noop"])],
)
def test_a_forced_call_is_a_grammar(hermes, choice, names):
    hermes.engine.answers = [CALL]
    message_of(hermes.chat(tools=TOOLS, tool_choice=choice))
    tag = hermes.engine.added[0].grammar.request.source
    assert [name for name in ("get_weather", "search", "noop") if f'\\"{name}\\"' in tag] == names


def test_with_choice_none_calls_are_text_and_tools_are_not_shown(hermes):
    hermes.engine.answers = [CALL]
    message, reason = message_of(hermes.chat(tools=TOOLS, tool_choice="none"))
    assert (message["content"], reason) == (CALL, "stop")
    assert "[tools]" not in hermes.llm.tokenizer.decode(hermes.engine.added[0].prompt_token_ids)


def test_tools_without_a_known_format_are_refused_with_advice(served):
    """The template of this model shows none."""
    response = served.chat(tools=TOOLS)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    assert "--tool-call-parser" in response.json()["error"]["message"]
    assert served.chat(tools=TOOLS, tool_choice="none").status_code == 200


def test_names_that_could_be_taken_for_the_format_are_refused(hermes):
    for name in ('f"', "</tool_call>", "", "a b"):
        response = hermes.chat(tools=[{"type": "function", "function": {"name": name}}])
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


def test_reasoning_is_told_apart(serve):
    thinking = serve(reasoning_parser="qwen3", tool_parser="hermes")
    thinking.engine.answers = [f"<think>\nIs <tool_call> needed?\n</think>\n\nYes.\n{CALL}"]
    message, reason = message_of(thinking.chat(tools=TOOLS))
    assert (message["reasoning"], message["content"], reason) == ("Is <tool_call> needed?", "Yes.", "tool_calls")
    assert len(message["tool_calls"]) == 1
    hidden, _ = message_of(thinking.chat(tools=TOOLS, include_reasoning=False))
    assert hidden.get("reasoning") is None
    assert hidden["content"] == "Yes."


def test_reasoning_that_never_ends_is_reasoning(serve, events):
    thinking = serve(reasoning_parser="deepseek-r1")
    thinking.engine.answers = ["On and on"]
    message, reason = message_of(thinking.chat(max_tokens=6))
    assert (message["reasoning"], message["content"] or "", reason) == ("On and", "", "length")
    deltas = [chunk["choices"][0]["delta"] for chunk in events(thinking.chat(max_tokens=6, stream=True))]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == "On and"


def test_a_constraint_is_for_what_follows_the_reasoning(serve):
    thinking = serve(reasoning_parser="deepseek-r1")
    thinking.chat(response_format={"type": "json_object"})
    tag = json.loads(thinking.engine.added[0].grammar.request.source)
    assert tag["format"]["elements"][-1] == {"type": "json_schema", "json_schema": {"type": "object"}}


def test_the_format_is_known_by_the_chat_template(served, registry):
    """With nothing configured."""
    template = '{{ "<tool_call>\\n{\\"name\\": …, \\"arguments\\": …}\\n</tool_call>" }}<|im_start|><think></think>'
    llm = served.llm
    llm.input_processor.chat_template = ChatTemplate(template, {})
    context = server_context(llm, llm.config.server, registry)
    assert type(context.tool_format).__name__ == "HermesFormat"
    assert context.reasoning_format is not None
