"""Following a grammar for some tokens, where nobody waits, before the step loop has to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from time import thread_time
from typing import Any

import numpy as np

from llmkit.hookspecs.structured import CompiledGrammar

NUM_TOKENS = 16
TOTAL_S = 0.5
"""Processor time for all tokens: more is not spent on a grammar that is only slow."""

Pick = Callable[[np.ndarray[Any, np.dtype[np.intp]]], int]


def too_slow(compiled: CompiledGrammar, tokens: Sequence[bytes], limit_s: float) -> str | None:
    """What is wrong with a grammar that needs more than `limit_s` seconds of processor time to find or to take a token,
    in words; None if nothing is. tokens: the vocabulary's.

    Two texts are followed for NUM_TOKENS: one of the longest tokens, which have most to be parsed, and a random one.
    What raises ends a text: it will raise in the step as well, where it ends its request alone.
    """
    lengths = np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens))
    draw = random.Random(0)
    end = thread_time() + TOTAL_S
    for pick in (lambda ids: int(ids[lengths[ids].argmax()]), lambda ids: int(ids[draw.randrange(len(ids))])):
        try:
            slowest, place = _followed(compiled, len(tokens), pick, end, limit_s)
        except MemoryError:
            raise
        except BaseException:  # a panic in Rust is no Exception
            continue
        if slowest > limit_s:
            return (
                f"finding what may come next takes too long: {slowest:.1f} s after {place} tokens "
                "(structured.mask_timeout_s)"
            )
    return None


def _followed(compiled: CompiledGrammar, vocab_size: int, pick: Pick, end: float, limit_s: float) -> tuple[float, int]:
    """Seconds of the slowest token, and how many there were before it; the text ends at a token over the limit."""
    row = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    grammar = compiled.start()
    slowest = (0.0, 0)
    for place in range(NUM_TOKENS):
        start = thread_time()
        grammar.fill_bitmask(row)
        slowest = max(slowest, (thread_time() - start, place))
        ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:vocab_size])
        if not len(ids) or slowest[0] > limit_s or thread_time() > end:
            break
        start = thread_time()
        if not grammar.accept(pick(ids)):
            break
        slowest = max(slowest, (thread_time() - start, place))
    return slowest
