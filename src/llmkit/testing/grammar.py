"""Grammars under test: built, asked for their tokens, followed at random, and judged by somebody else's validator."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from llmkit.errors import InvalidRequestError
from llmkit.frontend.token_vocabulary import TokenVocabulary
from llmkit.hookspecs.structured import CompiledGrammar, Grammar, GrammarCompiler, GrammarRequest
from llmkit.testing.byte_tokenizer import ByteTokenizer

WORDS = (
    *("true", "false", "null", "yes", "no", "10", "00", "1.", "e+", "-1", "ab", "abc", "ba", "aab", "the", "é", "日本"),
    *('{"', '":', '": ', '","', '",', '"}', '"]', "}}", "]}", "[{", "{}", "[]", "], [", ", ", ": ", "}, {"),
    *('"a', 'a"', 'a":', 'b":1', '\\"', "\\n", "\\u00", "  ", "\n\n", " \n "),
)
"""Tokens of several characters that cut across the tokens of JSON, and characters that are cut into bytes."""

_STRUCTURE = frozenset(b'"}],:{[0123456789')
_NASTY = frozenset(b'\\.eE-+0 \n\t/"u')


def small_vocabulary(extra_width: int = 0) -> TokenVocabulary:
    """All bytes, `WORDS` and an end token, in a row that is wider than the tokenizer by `extra_width`."""
    tokenizer = ByteTokenizer(WORDS)
    return TokenVocabulary.of(tokenizer, tokenizer.vocab_size + extra_width, [tokenizer.eos_token_id])


def built(compiler: GrammarCompiler, request: GrammarRequest) -> CompiledGrammar | None:
    """The compiled grammar, or None if the engine refuses the request, at the door or while compiling."""
    try:
        if compiler.problems(request):
            return None
        return compiler.load(request, compiler.compile(request))
    except InvalidRequestError:
        return None


def allowed(grammar: Grammar, vocabulary: TokenVocabulary) -> frozenset[int]:
    """The tokens that the mask allows. The row is full of ones before, so words that are not written show."""
    row = np.full(vocabulary.num_words, -1, dtype=np.int32)
    grammar.fill_bitmask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return frozenset(np.flatnonzero(bits).tolist())


def tokens_of(text: str | bytes, vocabulary: TokenVocabulary, random_: random.Random | None = None) -> list[int]:
    """Tokens that make up `text`: single bytes, or with `random_` any that fit."""
    data = text.encode() if isinstance(text, str) else text
    ids: list[int] = []
    while data:
        fitting = [i for i, token in enumerate(vocabulary.tokens) if token and data.startswith(token)]
        token_id = random_.choice(fitting) if random_ else min(fitting, key=lambda i: len(vocabulary.tokens[i]))
        ids.append(token_id)
        data = data[len(vocabulary.tokens[token_id]) :]
    return ids


def accepts(grammar: Grammar, token_ids: Iterable[int]) -> bool:
    """Whether the grammar, from where it is, accepts all tokens and may end there. The state changes."""
    return all(grammar.accept(token_id) for token_id in token_ids) and grammar.is_accepting()


def followed(
    grammar: Grammar,
    vocabulary: TokenVocabulary,
    random_: random.Random,
    *,
    max_tokens: int = 200,
    visit: Callable[[Grammar, list[int]], None] = lambda _grammar, _ids: None,
) -> bytes | None:
    """A text that the masks allow, drawn with a liking for the tokens of JSON and for what is easily got wrong; None if
    it has not ended after `max_tokens`. visit: called with the state and the tokens so far before each draw."""
    ids: list[int] = []
    for _ in range(max_tokens):
        visit(grammar, ids)
        possible = sorted(allowed(grammar, vocabulary))
        if grammar.is_accepting() and (not possible or random_.random() < 0.35):
            return b"".join(vocabulary.tokens[i] for i in ids)
        assert possible, f"nothing is allowed after {b''.join(vocabulary.tokens[i] for i in ids)!r}, which may not end"
        token_id = _drawn(possible, vocabulary, random_)
        assert grammar.accept(token_id), f"{vocabulary.tokens[token_id]!r} is allowed by the mask and not accepted"
        ids.append(token_id)
    return None


def _drawn(possible: Sequence[int], vocabulary: TokenVocabulary, random_: random.Random) -> int:
    kind = random_.random()
    wanted = _STRUCTURE if kind < 0.5 else _NASTY if kind < 0.75 else None
    liked = [i for i in possible if wanted is None or vocabulary.tokens[i][0] in wanted]
    return random_.choice(liked or possible)


def is_json(text: bytes) -> bool:
    """Whether `text` is strict JSON in UTF-8."""
    try:
        parsed(text)
    except ValueError:
        return False
    return True


def parsed(text: bytes) -> Any:
    """The value of a JSON text. Raises ValueError for anything that is not strict JSON."""
    return json.loads(text.decode(), parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
