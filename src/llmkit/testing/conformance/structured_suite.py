"""What is asked of a grammar engine."""

from __future__ import annotations

import json

import numpy as np
import pytest

from llmkit.hookspecs.structured import Grammar, GrammarRequest
from llmkit.testing.conformance.arguments import small_vocabulary
from llmkit.testing.conformance.target import Conformance


def allowed(grammar: Grammar, num_words: int) -> set[int]:
    """The tokens that may follow, from the bitmask; the row is full of other bits before."""
    row = np.full(num_words, 0x5A5A5A5A, dtype=np.int32)
    grammar.fill_bitmask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_a_choice_is_followed_byte_by_byte(conformance: Conformance) -> None:
    vocabulary = small_vocabulary()
    compiler = conformance.create(vocabulary=vocabulary)
    request = GrammarRequest("choice", json.dumps(["yes", "no"]))
    problems = compiler.problems(request)
    if problems:
        pytest.skip(f"it cannot express a choice: {'; '.join(problems)}")
    grammar = compiler.load(request, compiler.compile(request)).start()
    tokens = vocabulary.tokens
    assert {tokens[i] for i in allowed(grammar, vocabulary.num_words)} == {b"y", b"n", b"yes", b"no"}
    assert not grammar.is_accepting()
    for byte in b"no":
        assert byte in allowed(grammar, vocabulary.num_words)
        assert grammar.accept(byte)
    assert grammar.is_accepting()
    assert not allowed(grammar, vocabulary.num_words), "no text may follow"
