"""The suites of parsers notice parsers with one thing wrong."""

from __future__ import annotations

import json

import pytest

from llmkit.hookspecs.reasoning_parser import ReasoningDelta, ReasoningParser
from llmkit.hookspecs.tool_parser import ToolCallDelta, ToolDelta, ToolParser
from llmkit.requests.structured_outputs import StructuredOutputs
from llmkit.testing.conformance import reasoning_parser_suite as thoughts
from llmkit.testing.conformance import tool_parser_suite as calls
from llmkit.testing.conformance.target import conformance_of
from llmkit_reasoning_parsers.think_tags import ThinkTags
from llmkit_tool_parsers.hermes_format import HermesFormat, HermesParser


class Wrapped(ToolParser):
    """Right, until a subclass changes what goes in or comes out."""

    def __init__(self):
        self.inner = HermesParser()

    def feed(self, text):
        return self.changed(self.inner.feed(text))

    def finish(self):
        return self.changed(self.inner.finish())

    def changed(self, delta):
        return delta


class Forgetful(Wrapped):
    """What is kept at the end is lost."""

    def finish(self):
        return ToolDelta()


class Impatient(Wrapped):
    """Takes every piece for a whole answer."""

    def feed(self, text):
        one = HermesParser()
        first, last = one.feed(text), one.finish()
        return ToolDelta(first.content + last.content, first.tool_calls + last.tool_calls)


class Fragile(Wrapped):
    def feed(self, text):
        if "\x00" in text:
            raise ValueError(text)
        return super().feed(text)


class Late(Wrapped):
    """Tells everything at the end."""

    def __init__(self):
        super().__init__()
        self.pieces = []

    def feed(self, text):
        self.pieces.append(text)
        return ToolDelta()

    def finish(self):
        first, last = self.inner.feed("".join(self.pieces)), self.inner.finish()
        return ToolDelta(first.content + last.content, first.tool_calls + last.tool_calls)


class Rounding(Late):
    """Arguments are read and written again."""

    def changed(self, delta):
        return delta

    def finish(self):
        delta, told = super().finish(), []
        for index, name in {call.index: call.name for call in reversed(delta.tool_calls)}.items():
            arguments = "".join(call.arguments for call in delta.tool_calls if call.index == index)
            told.insert(0, ToolCallDelta(index, name, json.dumps(json.loads(arguments))))
        return ToolDelta(delta.content, tuple(told))


class Unordered(Wrapped):
    """Every piece of a call has its name."""

    def changed(self, delta):
        return ToolDelta(delta.content, tuple(ToolCallDelta(c.index, "noop", c.arguments) for c in delta.tool_calls))


class Greedy(Wrapped):
    """Any JSON object is a call."""

    def feed(self, text):
        if text.startswith("{") and text.endswith("}"):
            return ToolDelta(tool_calls=(ToolCallDelta(0, "noop", text),))
        return super().feed(text)


class Quadratic(Wrapped):
    """Goes through everything again for each piece. Its time is that of a clock of its own."""

    clock = 0.0

    def __init__(self):
        super().__init__()
        self.length = 0

    def feed(self, text):
        self.length += len(text)
        Quadratic.clock += self.length * 1e-7
        return super().feed(text)


def form(parser, constraint=None):
    class Form(HermesFormat):
        def parser(self, tools):  # noqa: ARG002
            return parser()

        def constraint(self, tools, choice, parallel):
            return super().constraint(tools, choice, parallel) if constraint is None else constraint

    return Form()


def every(check, cases):
    def run(made):
        for case in cases:
            check(made, case)

    return run


WRONG = [
    (Forgetful, every(calls.test_text_without_calls_is_content, ["<"])),
    (Impatient, calls.test_any_cutting_gives_the_same),
    (Fragile, every(calls.test_text_without_calls_is_content, calls.TEXTS)),
    (Late, calls.test_long_arguments_arrive_before_the_call_ends),
    (Rounding, every(calls.test_what_is_written_is_read, calls.CALLS)),
    (Unordered, calls.test_any_cutting_gives_the_same),
    (Greedy, every(calls.test_text_without_calls_is_content, calls.TEXTS)),
]


@pytest.mark.parametrize(("parser", "check"), WRONG, ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_parser_is_noticed_and_the_right_one_is_not(parser, check):
    check(form(Wrapped))
    with pytest.raises((AssertionError, ValueError)):
        check(form(parser))


def test_quadratic_time_is_noticed(monkeypatch):
    monkeypatch.setattr(calls, "process_time", lambda: Quadratic.clock)
    calls.test_hostile_texts_take_no_longer(form(Wrapped))
    with pytest.raises(AssertionError, match="characters of"):
        calls.test_hostile_texts_take_no_longer(form(Quadratic))


def test_wrong_grammars_are_noticed():
    hermes = conformance_of("tool_parser", "hermes", {}, "cpu")
    anything = form(Wrapped, StructuredOutputs(regex="<tool_call>[a-z]{3}"))
    with pytest.raises(AssertionError):
        calls.test_what_a_grammar_allows_is_read(hermes, anything, "required", False)
    with pytest.raises(AssertionError):
        calls.test_a_grammar_allows_what_the_format_writes(hermes, anything, "required")
    with pytest.raises(AssertionError):
        calls.test_a_free_choice_is_free(hermes, anything)


class Reasoning(ReasoningParser):
    """Wrong in the way that `fault` says."""

    def __init__(self, fault):
        self.inner = ThinkTags(always=False).parser("")
        self.fault = fault

    def feed(self, text):
        delta = self.inner.feed(text)
        if self.fault == "marks in the content":
            return ReasoningDelta(delta.reasoning, delta.content.replace("</think>", ""))
        if self.fault == "each piece by itself" and delta.content:
            return ReasoningDelta(delta.reasoning, delta.content.strip())
        return delta

    def finish(self):
        return ReasoningDelta() if self.fault == "forgets the end" else self.inner.finish()


class Thinking(ThinkTags):
    def __init__(self, fault):
        super().__init__(always=False)
        self.fault = fault

    def parser(self, prompt_tail):  # noqa: ARG002
        return Reasoning(self.fault)

    def constraint(self, answer, prompt_tail):
        return answer if self.fault == "no room to reason" else super().constraint(answer, prompt_tail)


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("marks in the content", thoughts.test_the_marks_in_the_content_are_content),
        ("each piece by itself", thoughts.test_any_cutting_gives_the_same),
        ("forgets the end", thoughts.test_what_may_be_a_mark_is_not_lost),
    ],
)
def test_wrong_reasoning_is_noticed(fault, check):
    check(Thinking("none"))
    with pytest.raises(AssertionError):
        check(Thinking(fault))


def test_a_constraint_that_leaves_no_room_to_reason_is_noticed():
    qwen3 = conformance_of("reasoning_parser", "qwen3", {}, "cpu")
    answer = StructuredOutputs(choice=("yes", "no"))
    thoughts.test_a_constraint_holds_after_the_reasoning(qwen3, Thinking("none"), answer)
    with pytest.raises(AssertionError):
        thoughts.test_a_constraint_holds_after_the_reasoning(qwen3, Thinking("no room to reason"), answer)
