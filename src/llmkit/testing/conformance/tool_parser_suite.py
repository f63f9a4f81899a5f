"""What is asked of a format of tool calls: what it writes it reads back, however the text is cut; nothing is lost and
nothing raises; a hostile text takes no longer than another one; its grammars make texts that it reads."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from time import process_time
from typing import Any

import pytest

from llmkit.grammars.constraints import grammar_request
from llmkit.hookspecs.structured import CompiledGrammar
from llmkit.hookspecs.tool_parser import ToolFormat
from llmkit.testing.answers import TOOLS, cuts, mutated, read_calls, read_with
from llmkit.testing.conformance.target import Conformance
from llmkit.testing.grammar import accepts, built, followed, small_vocabulary, tokens_of

Calls = list[tuple[str, str]]

CITY = '{"city": "Paris", "days": 3}'

CALLS: tuple[Calls, ...] = (
    [("get_weather", CITY)],
    [("noop", "{}")],
    [("get_weather", CITY), ("noop", "{}"), ("search", '{"query": "x"}'), ("get_weather", CITY)],
    [("search", '{"query": "a {\\"b\\": [1, 2}] \\\\ c", "tags": ["}", "]", "{\\"", ")", "(", ","]}')],
    [("search", '{"filter": {"a": {"b": [[], [{}], {"c": [1, {"d": null}]}]}, "e": true, "f": false}}')],
    [("search", '{"query": "line\\nline\\t\\"quoted\\" \'single\' it\'s"}')],
    [("search", '{"query": "é 日本 👩‍👧 \\u00e9 \\ud83d\\ude00 \\\\u0041"}')],
    [("search", '{"limit": 1.50}'), ("search", '{"limit": 12345678901234567890123}'), ("search", '{"limit": -1e-7}')],
    [("search", '{"filter": {"n": [0, -0, 1E5, 0.10, 100000000000000000000.25]}}')],
    [("search", '{"query": ""}'), ("search", '{"query": " "}'), ("search", '{"query": "0"}')],
    [("search", '{"query": "true", "tags": []}'), ("search", '{"tags": ["", "null"], "filter": {}}')],
)

TEXTS = (
    "",
    " ",
    "\n\n",
    "Plain text, with a line end.\n",
    "  An answer between blanks \n ",
    "Braces {a: [b, (c)]} and <tags> and a < b > c.",
    '{"answer": {"name": "Ada", "arguments": [1]}}',
    '{"name": "no_such_tool", "arguments": {}}',
    "[no_such_tool(a=1)]",
    "[1, 2, [3]]",
    "[",
    "{",
    "<",
    '{"name": "get_wea',
    "def f(x):\n    return [g(x=1)]\n",
    "日本語 👩‍👧 é \x00 \x1b",
)
"""Answers that are no calls in any format."""


@pytest.fixture(scope="module")
def form(conformance: Conformance) -> ToolFormat:
    made: ToolFormat = conformance.create()
    return made


def exact(arguments: str) -> Any:
    """The value of JSON text, with numbers as they are written."""
    return json.loads(arguments, parse_int=lambda text: ("number", text), parse_float=lambda text: ("number", text))


def values(calls: Any) -> list[tuple[str, Any]]:
    return [(name, exact(arguments)) for name, arguments in calls]


def described(calls: Calls) -> str:
    return " ".join(f"{name}{arguments}" for name, arguments in calls)[:60]


@pytest.mark.parametrize("calls", CALLS, ids=described)
def test_what_is_written_is_read(form: ToolFormat, calls: Calls) -> None:
    """Names, arguments as values, numbers as they are written; no text besides."""
    text = form.written(calls)
    found = read_with(form, text)
    assert values(found.calls) == values(calls), text
    assert found.content == "", text


def test_calls_within_texts_are_texts(form: ToolFormat) -> None:
    """The format's own marks, in an argument."""
    inner = form.written([("noop", "{}")])
    calls = [("search", json.dumps({"query": text})) for text in (inner, inner * 2, f"a {inner} b", f'"{inner}"')]
    for call in calls:
        assert values(read_with(form, form.written([call])).calls) == values([call])
    assert values(read_with(form, form.written(calls)).calls) == values(calls)


@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_text_without_calls_is_content(form: ToolFormat, text: str) -> None:
    for pieces in ([text], *cuts(text, random.Random(text))):
        found = read_calls(form.parser(TOOLS), pieces)
        assert found.calls == ()
        assert found.content == text
    assert read_calls(form.parser(()), [text]).content == text


@pytest.mark.parametrize("calls", CALLS[:3], ids=described)
def test_text_around_calls_is_content(form: ToolFormat, calls: Calls) -> None:
    found = read_with(form, f"Let me see. \n{form.written(calls)}\nThat is all.")
    assert values(found.calls) == values(calls)
    assert found.content.split() == ["Let", "me", "see.", "That", "is", "all."]


def corpus(form: ToolFormat, random_: random.Random) -> Iterator[str]:
    """Texts with calls, whole, cut off, broken and in bad company."""
    for calls in CALLS:
        text = form.written(calls)
        yield text
        yield f"Before\n{text}\nAfter {text} \n\n"
        yield text[: random_.randrange(len(text) + 1)]
        for _ in range(8):
            yield mutated(text, random_)
        yield mutated(text, random_) + mutated(random_.choice(TEXTS), random_) + text


def test_any_cutting_gives_the_same(form: ToolFormat) -> None:
    """Nothing raises, deltas are in order, and where no call was found the text is there as it was."""
    random_ = random.Random(1)
    for text in corpus(form, random_):
        whole = read_with(form, text)
        if not whole.calls:
            assert whole.content == text
        for pieces in cuts(text, random_):
            assert read_calls(form.parser(TOOLS), pieces) == whole, pieces


@pytest.mark.parametrize("calls", CALLS, ids=described)
def test_a_call_that_is_cut_off_is_told_so_far(form: ToolFormat, calls: Calls) -> None:
    """The answer breaks off after each character: whole calls are whole, arguments the beginning of what they would
    have been, and a text that has not become a call is content."""
    text = form.written(calls)
    whole = read_with(form, text).calls
    for end in range(len(text)):
        found = read_with(form, text[:end])
        assert len(found.calls) <= len(whole)
        assert found.calls[:-1] == whole[: max(0, len(found.calls) - 1)]
        for (name, arguments), (expected, full) in zip(found.calls, whole, strict=False):
            assert name == expected
            assert full.startswith(arguments), text[:end]
        assert text[:end].rstrip().endswith(found.content.strip()), text[:end]
        if not found.calls:
            assert found.content == text[:end]


def test_long_arguments_arrive_before_the_call_ends(form: ToolFormat) -> None:
    """Where the format allows it: at least, a call that is complete is told before the answer is."""
    text = form.written([("search", json.dumps({"query": "word " * 50})), ("noop", "{}")])
    parser = form.parser(TOOLS)
    told = [parser.feed(character) for character in text]
    assert any(delta.tool_calls for delta in told), "the first call is told only at the end of the answer"


def test_hostile_texts_take_no_longer(form: ToolFormat) -> None:
    """Parts of a call, and what a format may look for, over and over, in small pieces."""
    text = form.written(CALLS[4])
    parts = {text[start:end] for start in range(0, len(text), 13) for end in (start + 1, start + 9, len(text))}
    parts |= {text[:end] for end in range(1, len(text), 13)}
    parts |= {"{", "[", "(", "<", '"', "\\", "'", " ", "\n", "\n{", "\n[", "a", '{"', '{"name": ', "</", "\\u", "0"}
    size = 20_000
    for part in sorted(parts):
        hostile = part * (size // len(part))
        parser = form.parser(TOOLS)
        start = process_time()
        for place in range(0, len(hostile), 3):
            parser.feed(hostile[place : place + 3])
        parser.finish()
        assert process_time() - start < 4, f"{size} characters of {part[:40]!r}"


# ---- grammars


def grammar_of(conformance: Conformance, form: ToolFormat, tools: Any, choice: str, parallel: bool) -> Any:
    """The compiled constraint by the first grammar engine that has it; None if there is no constraint."""
    constraint = form.constraint(tools, choice, parallel)
    if constraint is None:
        return None
    vocabulary = small_vocabulary()
    request = grammar_request(constraint, vocabulary, 1)
    engines, _ = conformance.registry.candidates("structured", conformance.environment)
    if not engines:
        pytest.skip("no grammar engine is installed")
    for engine in engines:
        compiled = built(conformance.registry.build(engine, {"vocabulary": vocabulary}), request)
        if compiled is not None:
            return compiled
    pytest.fail(f"no grammar engine can express the constraint for {choice}: {constraint}")


CHOICES = [(choice, parallel) for choice in ("required", "get_weather", "noop") for parallel in (True, False)]


@pytest.mark.parametrize(("choice", "parallel"), CHOICES)
def test_what_a_grammar_allows_is_read(conformance: Conformance, form: ToolFormat, choice: str, parallel: bool) -> None:
    """Random texts of the grammar are calls of the right tools, as many as there may be, whose arguments meet the
    schemas."""
    compiled = grammar_of(conformance, form, TOOLS, choice, parallel)
    assert compiled is not None, f"tool_choice {choice} must have a constraint"
    random_ = random.Random(7)
    texts = [text for _ in range(30) if (text := followed_text(compiled, random_)) is not None]
    if not texts and choice == "get_weather":
        pytest.skip("its grammar has free texts, which do not end by chance")
    assert texts, "no text of the grammar comes to an end"
    for text in texts:
        found = read_with(form, text)
        assert found.content == "", text
        assert found.calls, text
        assert parallel or len(found.calls) == 1, text
        for name, arguments in found.calls:
            assert choice in ("required", name), text
            check_arguments(name, arguments, text)


def followed_text(compiled: CompiledGrammar, random_: random.Random) -> str | None:
    found = followed(compiled.start(), small_vocabulary(), random_, max_tokens=400)
    return None if found is None else found.decode(errors="replace")


def check_arguments(name: str, arguments: str, text: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    (tool,) = (tool["function"] for tool in TOOLS if tool["function"]["name"] == name)
    value = json.loads(arguments)
    schema = tool.get("parameters", {"type": "object", "maxProperties": 0})
    assert jsonschema.Draft202012Validator(schema).is_valid(value), (text, arguments)


@pytest.mark.parametrize("choice", ["required", "get_weather"])
def test_a_grammar_allows_what_the_format_writes(conformance: Conformance, form: ToolFormat, choice: str) -> None:
    """One call, and several only if there may be several. The marks of some formats are special tokens, which no
    grammar has: then what follows them."""
    vocabulary = small_vocabulary()
    for calls in (CALLS[0], CALLS[0] * 2):
        text = form.written(calls)
        for parallel in (True, False):
            compiled = grammar_of(conformance, form, TOOLS, choice, parallel)
            fits = accepts(compiled.start(), tokens_of(text, vocabulary))
            if form.needs_special_tokens:
                fits = any(accepts(compiled.start(), tokens_of(text[i:], vocabulary)) for i in range(20))
            assert fits == (parallel or len(calls) == 1), text


def test_a_free_choice_is_free(conformance: Conformance, form: ToolFormat) -> None:
    """Without strict tools nothing is asked that would take a grammar; with them text is still allowed."""
    assert form.constraint(TOOLS, "auto", True) is None
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    for tools, parallel in ((strict, True), (TOOLS, False)):
        compiled = grammar_of(conformance, form, tools, "auto", parallel)
        if compiled is not None:
            assert accepts(compiled.start(), tokens_of("Just a text.", small_vocabulary()))
            written = form.written(CALLS[0])
            assert accepts(compiled.start(), tokens_of(f"Text: {written}", small_vocabulary()))
