"""Requests with a grammar over the fake executor: a vocabulary of texts, a service that compiles when it is told to,
and the answer that must come."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmkit.frontend.token_vocabulary import TokenVocabulary
from llmkit.grammars.cache import GrammarFailure, ReadyGrammar
from llmkit.grammars.service import Ticket
from llmkit.hookspecs.structured import GrammarRequest
from llmkit.registry.breaker import Breaker
from llmkit.registry.timings import CallTiming
from llmkit.requests.grammar_task import GrammarTask
from llmkit.testing.fake_executor import VOCABULARY, next_hash, sample
from llmkit.testing.hostile_grammars import HostileCompiler
from llmkit.testing.scheduling import SchedulingHarness

EOS = VOCABULARY - 1
PAIRS = "aeiou"


def fake_vocabulary() -> TokenVocabulary:
    """Printable characters, pairs of vowels, and ids without text; the last id ends answers."""
    pairs = [a + b for a in PAIRS for b in PAIRS]
    texts = [chr(code) for code in range(32, 127)] + pairs
    tokens = [text.encode() for text in texts] + [b""] * (VOCABULARY - len(texts))
    return TokenVocabulary(tuple(tokens), frozenset({EOS}), frozenset({EOS}))


VOCABULARY_OF_TEXTS = fake_vocabulary()


@dataclass
class OneBackend:
    """What the gate wants to know of an engine."""

    breaker: Breaker = field(default_factory=lambda: Breaker("structured", "hostile"))
    calls: dict[str, CallTiming] = field(default_factory=dict)
    vocabulary: TokenVocabulary = VOCABULARY_OF_TEXTS

    def backend(self, choice: str) -> OneBackend:
        assert choice == "hostile"
        return self


class ManualService:
    """Compiles at once, or when it is told to."""

    def __init__(self, at_once: bool = True) -> None:
        self.at_once = at_once
        self.backends = OneBackend()
        self.tickets: list[Ticket] = []
        self.cancelled: list[Ticket] = []
        self._finished: list[Ticket] = []

    def submit(self, task: GrammarTask) -> Ticket:
        ticket = Ticket(task)
        self.tickets.append(ticket)
        if self.at_once:
            ticket.result = self._compiled(task.request)
        return ticket

    def _compiled(self, request: GrammarRequest) -> ReadyGrammar:
        compiled = HostileCompiler(VOCABULARY_OF_TEXTS).load(request, request.source.encode())
        row = np.zeros(VOCABULARY_OF_TEXTS.num_words, dtype=np.int32)
        grammar = compiled.start()
        grammar.fill_bitmask(row)
        return ReadyGrammar("hostile", compiled, row, grammar.is_accepting())

    def finish(self, ticket: Ticket, failure: GrammarFailure | None = None) -> None:
        ticket.result = failure or self._compiled(ticket.task.request)
        self._finished.append(ticket)

    def cancel(self, ticket: Ticket) -> None:
        self.cancelled.append(ticket)

    def finished(self) -> list[Ticket]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass


def constrained(*choices: str, **fields: Any) -> dict[str, Any]:
    """Fields of a request whose answer is one of `choices`."""
    task = GrammarTask(GrammarRequest("choice", json.dumps(choices)), ("hostile",))
    return {"grammar": task, "eos_token_ids": frozenset({EOS}), "stop_token_ids": frozenset({EOS}), **fields}


def text_of(run: SchedulingHarness, request_id: str, index: int = 0) -> str:
    tokens = run.answers[request_id, index].token_ids
    return b"".join(VOCABULARY_OF_TEXTS.tokens[token] for token in tokens).decode()


def alone(prompt: list[int], seed: int, choices: tuple[str, ...]) -> list[int]:
    """The tokens that the fake model answers under a grammar, without any scheduler."""
    grammar = HostileCompiler(VOCABULARY_OF_TEXTS).load(
        GrammarRequest("choice", json.dumps(choices)), json.dumps(choices).encode()
    ).start()  # fmt: skip
    history = 0
    for token in prompt:
        history = next_hash(history, token)
    answer: list[int] = []
    row = np.zeros(VOCABULARY_OF_TEXTS.num_words, dtype=np.int32)
    while True:
        grammar.fill_bitmask(row)
        if grammar.is_accepting():
            if not row.any():
                return answer
            row[EOS // 32] |= np.int32(1 << (EOS % 32))
        answer.append(sample(history, seed, row))
        history = next_hash(history, answer[-1])
        if answer[-1] == EOS:
            return answer
        assert grammar.accept(answer[-1])
