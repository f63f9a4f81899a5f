"""Reasoning between tags: prompts that have opened or closed the block, blocks that are never closed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmkit.requests.structured_outputs import StructuredOutputs
from llmkit.testing.answers import read_reasoning
from llmkit_reasoning_parsers.think_tags import ThinkTags

R1, QWEN3 = ThinkTags(always=True), ThinkTags(always=False)
OPENED, CLOSED, PLAIN = "<|im_start|>assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n", "assistant\n"

CASES = [
    # format, end of the prompt, answer, reasoning, content
    (R1, PLAIN, "One.\n</think>\n\nTwo.", "One.", "Two."),
    (R1, PLAIN, "<think>\nOne.\n</think>\n\nTwo.", "One.", "Two."),
    (R1, OPENED, "One.</think>Two.", "One.", "Two."),
    (R1, CLOSED, "Two.</think>", "", "Two.</think>"),
    (R1, PLAIN, "Never closed.\n", "Never closed.\n", ""),
    (R1, PLAIN, "", "", ""),
    (QWEN3, PLAIN, "Two.", "", "Two."),
    (QWEN3, PLAIN, "\n Two. ", "", "\n Two. "),
    (QWEN3, PLAIN, "\n<think>One.</think>\n\nTwo.", "One.", "Two."),
    (QWEN3, PLAIN, "Two. <think>no</think>", "", "Two. <think>no</think>"),
    (QWEN3, PLAIN, "One.</think>", "", "One.</think>"),
    (QWEN3, OPENED, "One.</think>\nTwo.", "One.", "Two."),
    (QWEN3, OPENED, "Never closed. </thin", "Never closed. </thin", ""),
    (QWEN3, CLOSED, "<think>Two.", "", "<think>Two."),
    (QWEN3, PLAIN, "<think>\n\n</think>\n\nTwo.", "", "Two."),
    (QWEN3, PLAIN, "<think></think>Two.", "", "Two."),
    (QWEN3, PLAIN, '<think>One.</think>\n"</think>" ends it', "One.", '"</think>" ends it'),
    (QWEN3, PLAIN, "<think>One <think> two.</think>Three.", "One <think> two.", "Three."),
    (QWEN3, "What is <think>?\nassistant\n", "A tag.", "", "A tag."),
    (R1, "What is </think>?\nassistant\n", "One.</think>Two.", "One.", "Two."),
]


@pytest.mark.parametrize(("form", "prompt", "text", "reasoning", "content"), CASES)
def test_cases(form, prompt, text, reasoning, content):
    for pieces in ([text], list(text), [text[: len(text) // 2], text[len(text) // 2 :]]):
        assert read_reasoning(form.parser(prompt), pieces) == (reasoning, content)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "</th", "ink>", " ", "\n", "a", "é"]), max_size=20),
       st.lists(st.integers(0, 60)))  # fmt: skip
def test_any_cutting_gives_the_same(words, places):
    text = "".join(words)
    ends = sorted({min(place, len(text)) for place in places} | {len(text)})
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    for form in (R1, QWEN3):
        for prompt in (OPENED, CLOSED, PLAIN):
            whole = read_reasoning(form.parser(prompt), [text])
            assert read_reasoning(form.parser(prompt), pieces) == whole
            assert read_reasoning(form.parser(prompt), list(text)) == whole


def test_a_constraint_allows_reasoning_where_it_may_come():
    answer = StructuredOutputs(json={"type": "object"}, disable_any_whitespace=True)
    assert R1.constraint(answer, CLOSED) is answer
    assert QWEN3.constraint(answer, CLOSED) is answer
    for form in (R1, QWEN3):
        opened = form.constraint(answer, OPENED)
        assert opened.structural_tag["format"]["elements"][0]["elements"][0]["begin"] == ""
        assert opened.disable_any_whitespace
    assert QWEN3.constraint(answer, PLAIN).structural_tag["format"]["elements"][0]["type"] == "optional"
    assert R1.constraint(answer, PLAIN).structural_tag["format"]["elements"][0]["type"] == "sequence"
