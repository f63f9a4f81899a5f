"""Where requests wait while their grammar is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.errors import EngineError
from llmkit.grammars.cache import GrammarFailure, ReadyGrammar
from llmkit.requests.request import RequestStatus
from llmkit.scheduling.mask_threads import MAX_LOST, MaskThreads
from llmkit.scheduling.sequence_grammar import GrammarGuard, SequenceGrammar, StopMasks

if TYPE_CHECKING:
    from llmkit.grammars.service import GrammarService, Ticket
    from llmkit.requests.request import Request, RequestGroup

PARAM = "structured_outputs"


class GrammarGate:
    """Owns the groups that wait for a grammar, and the threads that find masks. Without a service, a request with a
    grammar fails.

    mask_timeout_s: longest that the mask of one token may take, in seconds of processor time.
    """

    def __init__(self, service: GrammarService | None, mask_timeout_s: float = 1.0) -> None:
        self._service = service
        self.masks = MaskThreads(mask_timeout_s)
        self._tickets: dict[Ticket, RequestGroup] = {}
        self._by_group: dict[RequestGroup, Ticket] = {}
        self._at_once: list[Ticket] = []
        self._guards: dict[str, GrammarGuard] = {}

    def __len__(self) -> int:
        """Requests that wait here."""
        return len(self._by_group)

    def __contains__(self, group: RequestGroup) -> bool:
        return group in self._by_group

    def enter(self, group: RequestGroup) -> None:
        """`group`, whose request has a grammar, waits for it; `leave` returns it, or `drop` takes it out."""
        task = group.request.grammar
        assert task is not None
        if self._service is None:
            raise EngineError("This engine was built without grammars, but a request has one.")
        ticket = self._service.submit(task)
        self._tickets[ticket] = group
        self._by_group[group] = ticket
        if ticket.result is not None:
            self._at_once.append(ticket)

    def drop(self, group: RequestGroup) -> None:
        """Nobody wants its grammar any more. Nothing happens if the group does not wait."""
        ticket = self._by_group.pop(group, None)
        if ticket is not None and self._service is not None:
            del self._tickets[ticket]
            self._service.cancel(ticket)

    def clear(self) -> None:
        """Nobody waits any more."""
        for group in list(self._by_group):
            self.drop(group)

    def leave(self) -> list[tuple[RequestGroup, ReadyGrammar | GrammarFailure]]:
        """The groups whose wait is over, in the order of the outcomes, and what came of it."""
        if not self._tickets or self._service is None:
            return []
        tickets, self._at_once = [*self._at_once, *self._service.finished()], []
        found: list[tuple[RequestGroup, ReadyGrammar | GrammarFailure]] = []
        for ticket in tickets:
            group = self._tickets.pop(ticket, None)
            if group is not None and ticket.result is not None:
                del self._by_group[group]
                found.append((group, self._stuck(ticket.result) or ticket.result))
        return found

    def _stuck(self, result: ReadyGrammar | GrammarFailure) -> GrammarFailure | None:
        """What is wrong with beginning another sequence of this engine now; None if nothing is."""
        if isinstance(result, GrammarFailure) or (lost := self.masks.num_lost(result.backend)) < MAX_LOST:
            return None
        return GrammarFailure(
            f"The grammar engine {result.backend} is still at work in {lost} threads for requests that have been given "
            "up, and takes no others until some of them are done; try again later.",
            refused=False,
            overloaded=True,
        )

    def wait(self, timeout_s: float) -> None:
        """Until somebody may leave, or a mask that is late is there, or the time is over."""
        if self.masks.num_late:
            self.masks.wait(timeout_s)
        elif self._service is not None and self._tickets and not self._at_once:
            self._service.wait(timeout_s)

    def close(self) -> None:
        """End what compiles and what finds masks."""
        self.masks.close()
        if self._service is not None:
            self._service.close()

    def begin(self, group: RequestGroup, ready: ReadyGrammar) -> GrammarFailure | None:
        """Give every sequence of `group` its grammar. Tokens of an earlier engine are taken in. What is wrong, or None;
        a sequence whose text is complete already says so."""
        assert self._service is not None
        request = group.request
        vocab_size = self._service.backends.vocabulary.vocab_size
        stops = StopMasks(request.stop_token_ids, request.eos_token_ids, vocab_size)
        row, complete = SequenceGrammar.first_step(ready, stops)
        if row is None:
            return GrammarFailure("structured_outputs allows no text that this model can write.")
        row.flags.writeable = False
        guard = self._guard(ready.backend)
        for sequence in group.sequences:
            sequence.grammar = SequenceGrammar(ready, stops, guard, row)
            sequence.grammar.complete = complete
        return next((problem for problem in map(_resume, group.sequences) if problem is not None), None)

    def _guard(self, choice: str) -> GrammarGuard:
        guard = self._guards.get(choice)
        if guard is None:
            assert self._service is not None
            backend = self._service.backends.backend(choice)
            guard = GrammarGuard(choice, backend.breaker, backend.calls, self.masks.limit_s)
            self._guards[choice] = guard
        return guard


def _resume(sequence: Request) -> GrammarFailure | None:
    """Take in what `sequence` has produced in an earlier engine. What is wrong with it, or None."""
    prior = sequence.token_ids[sequence.num_prompt_tokens :]
    if not prior or sequence.status is RequestStatus.FINISHED:
        return None
    assert sequence.grammar is not None
    return sequence.grammar.advance(prior)
