"""The grammar of one sequence: which tokens may come next, and whether the text is complete."""

from __future__ import annotations

from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any

import numpy as np

from llmkit.errors import InvalidRequestError, described
from llmkit.grammars.cache import GrammarFailure
from llmkit.registry.timings import CallTiming

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llmkit.grammars.cache import ReadyGrammar
    from llmkit.hookspecs.structured import Grammar
    from llmkit.registry.breaker import Breaker

Words = np.ndarray[Any, np.dtype[np.int32]]

SLOW_S = 0.005
"""Processor time of a token above which the steps do not wait for the next one of that sequence."""

ALLOWANCE = 30
"""How many times the limit of one token the slow tokens of a sequence may take together."""


class StopMasks:
    """The stop tokens of one request as bits. They never belong to the text: a grammar that allows one (it may be an
    ordinary token that the request has made a stop token) is overruled, and a complete text may be followed by one.

    Where the request has end-of-sequence tokens, only they may follow; otherwise its other stop tokens.
    """

    def __init__(self, stop_token_ids: Iterable[int], eos_token_ids: Iterable[int], vocab_size: int) -> None:
        stops = [token_id for token_id in stop_token_ids if token_id < vocab_size]
        eos = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        self.num_words = -(-vocab_size // 32)
        self.may_end = bool(stops)
        inside = ~_bits(range(vocab_size, self.num_words * 32), self.num_words)
        self._text = inside & ~_bits(stops, self.num_words)
        self._ends = _bits(eos or stops, self.num_words)

    def text(self, row: Words) -> bool:
        """Take the stop tokens out of `row`, in place; whether anything is left."""
        row &= self._text
        return bool(row.any())

    def add_ends(self, row: Words) -> None:
        """Put the tokens that may end the answer into `row`, in place."""
        row |= self._ends


class GrammarGuard:
    """What all sequences with grammars of one engine share: its breaker, the times of its calls, and `limit_s`, the
    longest that the mask of one token may take, in seconds of processor time."""

    def __init__(self, name: str, breaker: Breaker, calls: dict[str, CallTiming], limit_s: float) -> None:
        self.name = name
        self.breaker = breaker
        self.masks = calls.setdefault("fill_bitmask", CallTiming())
        self.accepts = calls.setdefault("accept", CallTiming())
        self.limit_s = limit_s


class SequenceGrammar:
    """Owned by its sequence, used by the step loop, and by a thread of `MaskThreads` while it is `pending`.

    row int32[words]: what may come next, stop tokens included where they may; the plan takes it as it is. complete:
    nothing may come next, the text is whole. pending: the last sampled token has not been taken in yet, so that none of
    these says anything. slow: whether the last token took more than SLOW_S. Whatever the grammar raises or denies
    becomes a message, and is counted as the engine's fault unless it is an InvalidRequestError.
    """

    __slots__ = ("_guard", "_own", "_ready", "_slow_s", "_state", "_stops", "complete", "pending", "row", "slow")

    def __init__(self, ready: ReadyGrammar, stops: StopMasks, guard: GrammarGuard, first_row: Words) -> None:
        """first_row: of `first_step`, shared by the sequences of a request."""
        self._ready = ready
        self._stops = stops
        self._guard = guard
        self._state: Grammar | None = None
        self._own = False
        self.row = first_row
        self.complete = False
        self.pending = False
        self.slow = False
        self._slow_s = 0.0

    @property
    def engine(self) -> str:
        """The grammar engine that it is of."""
        return self._guard.name

    def __del__(self) -> None:
        self._state = None  # before the grammar, which is released when nothing uses it

    @staticmethod
    def first_step(ready: ReadyGrammar, stops: StopMasks) -> tuple[Words | None, bool]:
        """(the row of the first token, whether the empty text is already all there can be); None for the row if no
        text can be written at all."""
        row: Words = ready.row.copy()
        going_on = stops.text(row)
        if not going_on:
            return (row, True) if ready.accepting else (None, False)
        if ready.accepting:
            stops.add_ends(row)
        return row, False

    def advance(self, token_ids: Iterable[int], *, last: bool = False) -> GrammarFailure | None:
        """Take in tokens of the text, none of them a stop token that ends it. last: no further token is going to be
        sampled, so only `complete` is of interest. What is wrong, or None."""
        start = thread_time()
        problem = self._advance(token_ids, last=last)
        seconds = thread_time() - start
        self.slow = seconds > SLOW_S
        if self.slow:
            self._slow_s += seconds
            return problem or self.too_slow(seconds)
        return problem

    def too_slow(self, seconds: float, *, at_least: bool = False) -> GrammarFailure | None:
        """What is wrong if a token takes so long, or together with those before it, or None. at_least: it has not come
        to an end after `seconds`, of the clock if they were not spent computing, which is wrong in any case."""
        limit = self._guard.limit_s
        if at_least:
            return GrammarFailure(
                f"The grammar is too complex: the tokens allowed at one place were not found in {seconds:.1f} s, "
                f"the limit is {limit:g} s (structured.mask_timeout_s)."
            )
        if seconds > limit:
            return GrammarFailure(
                f"The grammar is too complex: the tokens allowed at one place took {seconds:.1f} s to find, "
                f"more than {limit:g} s (structured.mask_timeout_s)."
            )
        if self._slow_s > ALLOWANCE * limit:
            return GrammarFailure(
                f"The grammar is too complex: finding the tokens allowed took {self._slow_s:.1f} s in all, more than "
                f"{ALLOWANCE} times structured.mask_timeout_s ({limit:g} s)."
            )
        return None

    def _advance(self, token_ids: Iterable[int], *, last: bool) -> GrammarFailure | None:
        guard = self._guard
        try:
            start = perf_counter()
            if self._state is None:
                self._state = self._ready.compiled.start()
            state = self._state
            for token_id in token_ids:
                if not state.accept(token_id):
                    guard.breaker.record(f"does not accept token {token_id}, which it had allowed")
                    return GrammarFailure(
                        f"The grammar engine {guard.name} does not accept a token that it had allowed.", refused=False
                    )
            accepting = bool(state.is_accepting())
            accepted = perf_counter()
            guard.accepts.add(accepted - start)
            if last and not accepting:
                return None
            return self._fill(state, accepting)
        except KeyboardInterrupt:
            raise
        except InvalidRequestError as error:
            return GrammarFailure(error.message)
        except BaseException as error:  # a panic in Rust is no Exception
            guard.breaker.record(error)
            return GrammarFailure(f"The grammar engine {guard.name} failed: {described(error)}", refused=False)

    def _fill(self, state: Grammar, accepting: bool) -> GrammarFailure | None:
        guard = self._guard
        if not self._own:
            self.row = np.zeros(self._stops.num_words, dtype=np.int32)
            self._own = True
        start = perf_counter()
        state.fill_bitmask(self.row)
        guard.masks.add(perf_counter() - start)
        going_on = self._stops.text(self.row)
        if accepting:
            self.complete = not going_on
            self._stops.add_ends(self.row)
        elif not going_on:
            return GrammarFailure("The grammar has come to a point from which no token of this model leads on.")
        return None


def _bits(token_ids: Iterable[int], num_words: int) -> Words:
    words = np.zeros(num_words, dtype=np.uint32)
    ids = np.fromiter(token_ids, dtype=np.int64)
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return words.view(np.int32)
