"""What is asked of a format of reasoning: what it writes it reads back, however the text is cut; nothing is lost and
nothing raises; a hostile text takes no longer than another one; constraints hold for what follows the reasoning."""

from __future__ import annotations

import random
from time import process_time

import pytest

from llmkit.grammars.constraints import grammar_request
from llmkit.hookspecs.reasoning_parser import ReasoningFormat
from llmkit.requests.structured_outputs import StructuredOutputs
from llmkit.testing.answers import cuts, mutated, read_reasoning
from llmkit.testing.conformance.target import Conformance
from llmkit.testing.grammar import accepts, built, small_vocabulary, tokens_of

ANSWERS = (
    ("Let me think.\nOne, two.", "Three."),
    ("", "No need to think."),
    ("Only thinking.", ""),
    ("a < b, <b>, </b>, </ think>, <think", "x < y and </p>"),
    ("日本 👩‍👧", "é\n\n```\ncode\n```\n"),
    ("One.\n\n\nTwo.", "  kept inside:   \n\n  yes"),
)

PROMPTS = ("", "<|user|>\nHi<|assistant|>\n", "What does <think> do?\n<|assistant|>\n")
"""Ends of prompts in which no block was opened or closed."""


@pytest.fixture(scope="module")
def form(conformance: Conformance) -> ReasoningFormat:
    made: ReasoningFormat = conformance.create()
    return made


@pytest.mark.parametrize(("reasoning", "content"), ANSWERS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_what_is_written_is_read(form: ReasoningFormat, reasoning: str, content: str, prompt: str) -> None:
    """But for blanks beside the marks, of which there may be some."""
    found = read_reasoning(form.parser(prompt), [form.written(reasoning, content)])
    assert [part.strip() for part in found] == [reasoning.strip(), content.strip()]
    assert not found[1].startswith("\n"), "the line breaks after the block are not part of the answer"


def test_the_marks_in_the_content_are_content(form: ReasoningFormat) -> None:
    """Only the first block is one."""
    block = form.written("thought", "")
    for content in (f'"{block.strip()}"', f"See: {block}and {block}ends."):
        assert read_reasoning(form.parser(""), [form.written("Yes.", content)]) == ("Yes.", content)


def test_any_cutting_gives_the_same(form: ReasoningFormat) -> None:
    random_ = random.Random(1)
    texts = [form.written(*answer) for answer in ANSWERS] + ["", " ", "\n", "Just text.", " Text.\n"]
    texts += [mutated(text, random_) for text in texts * 6] + [text * 2 for text in texts]
    for text in texts:
        for prompt in PROMPTS:
            whole = read_reasoning(form.parser(prompt), [text])
            for pieces in cuts(text, random_):
                assert read_reasoning(form.parser(prompt), pieces) == whole, pieces


def test_nothing_is_lost(form: ReasoningFormat) -> None:
    """Broken at any place, an answer still holds every word: in the reasoning, or in the content."""
    words = "alpha beta gamma", "delta epsilon"
    text = form.written(*words)
    for end in range(len(text) + 1):
        reasoning, content = read_reasoning(form.parser(""), [text[:end]])
        told = f"{reasoning} {content}".split()
        assert all(word in told for word in " ".join(words).split() if f"{word} " in text[:end]), text[:end]
        for part in (reasoning, content):
            assert part.strip() in text[:end]


def test_what_may_be_a_mark_is_not_lost(form: ReasoningFormat) -> None:
    """An answer that breaks off within the mark at the end of the block: so far it is reasoning."""
    text = form.written("alpha", "beta")
    begin = text.index("alpha")
    for end in range(begin + 1, len(text)):
        if read_reasoning(form.parser(""), [f"{text[:end]}beta"])[1]:
            break  # the mark is complete
        reasoning, _ = read_reasoning(form.parser(""), [text[:end]])
        assert reasoning.strip() == text[begin:end].strip()


def test_reasoning_arrives_before_it_ends(form: ReasoningFormat) -> None:
    parser = form.parser("")
    text = form.written("word " * 50, "answer " * 50)
    told = [parser.feed(character) for character in text]
    assert sum(bool(delta.reasoning) for delta in told) > 40, "reasoning is held back"
    assert sum(bool(delta.content) for delta in told) > 40, "content is held back"


def test_hostile_texts_take_no_longer(form: ReasoningFormat) -> None:
    text = form.written("a", "b")
    parts = {text[start:end] for start in range(0, len(text), 3) for end in (start + 1, start + 5, len(text))}
    size = 20_000
    for part in sorted(parts | {" ", "\n", "<", "</", "a"}):
        hostile = part * (size // len(part))
        parser = form.parser("")
        start = process_time()
        for place in range(0, len(hostile), 3):
            parser.feed(hostile[place : place + 3])
        parser.finish()
        assert process_time() - start < 4, f"{size} characters of {part!r}"


@pytest.mark.parametrize(
    "answer",
    [
        StructuredOutputs(choice=("yes", "no")),
        StructuredOutputs(regex="yes|no"),
        StructuredOutputs(json={"enum": ["yes"]}),
        StructuredOutputs(grammar='root ::= "yes" | "no"'),
    ],
    ids=lambda answer: answer.constraint,
)
def test_a_constraint_holds_after_the_reasoning(
    conformance: Conformance, form: ReasoningFormat, answer: StructuredOutputs
) -> None:
    vocabulary = small_vocabulary()
    request = grammar_request(form.constraint(answer, ""), vocabulary, 1)
    engines, _ = conformance.registry.candidates("structured", conformance.environment)
    made = (built(conformance.registry.build(engine, {"vocabulary": vocabulary}), request) for engine in engines)
    compiled = next((grammar for grammar in made if grammar is not None), None)
    if compiled is None:
        pytest.skip("no grammar engine is installed that can express it")
    right, wrong = ('"yes"', '"no"') if answer.constraint == "json" else ("yes", "maybe")
    assert accepts(compiled.start(), tokens_of(form.written("Let me think: maybe.", right), vocabulary))
    assert not accepts(compiled.start(), tokens_of(form.written("Let me think: yes.", wrong), vocabulary))
    assert not accepts(compiled.start(), tokens_of(form.written(right, ""), vocabulary))
