"""What is asked of a grammar engine."""

from __future__ import annotations

import json

import numpy as np

from llmkit.hookspecs.structured import Grammar, GrammarRequest
from llmkit.testing.byte_tokenizer import ByteTokenizer
from llmkit.testing.conformance.target import Conformance


def allowed(grammar: Grammar, vocabulary: int) -> set[int]:
    """The tokens that may follow, from the bitmask; the row starts with every bit set."""
    row = np.full(-(-vocabulary // 32), -1, dtype=np.int32)
    grammar.fill_bitmask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:vocabulary]
    return set(np.flatnonzero(bits).tolist())


def test_a_choice_is_followed_byte_by_byte(conformance: Conformance) -> None:
    tokenizer = ByteTokenizer()
    compiler = conformance.create(tokenizer=tokenizer)
    request = GrammarRequest("choice", json.dumps(["yes", "no"]))
    if compiler.problems(request):
        return
    grammar = compiler.compile(request)
    starts = {tokenizer.token_text(token)[0] for token in allowed(grammar, tokenizer.vocab_size)}
    assert starts == {"y", "n"}
    for token in b"no":
        assert token in allowed(grammar, tokenizer.vocab_size)
        assert grammar.accept(token)
    assert allowed(grammar, tokenizer.vocab_size) <= {tokenizer.eos_token_id}, "nothing may follow but the end"
