"""The requests that are under way, and what each has produced: enough to go on with them in another process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from llmkit.requests.message import EngineOutput, EngineRequest, FinishReason, PriorOutput, refusal_outputs


@dataclass(eq=False)
class Entry:
    """One request. token_ids, ends: by sequence. sent: number of the message that took it to the process now running;
    None if it has not been sent to that. strikes: crashes in a row that it was part of, without having come further
    meanwhile; tokens_at_strike: how far it was at the last; others_at_strike: what all others had been told at the
    first of them. num_cached_tokens: as first told.
    """

    request: EngineRequest
    token_ids: list[list[int]]
    ends: list[FinishReason | None]
    num_prompt_logprobs: int = 0
    num_cached_tokens: int | None = None
    sent: int | None = None
    resumed: bool = False
    strikes: int = 0
    tokens_at_strike: int = 0
    others_at_strike: int = 0

    @classmethod
    def of(cls, request: EngineRequest) -> Entry:
        prior = request.prior_outputs or (PriorOutput(),) * request.sampling_params.n
        return cls(
            request,
            [list(output.token_ids) for output in prior],
            [output.finish_reason for output in prior],
            request.num_prior_prompt_logprobs,
        )

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens that all sequences have produced, and prompt positions that were scored."""
        return sum(map(len, self.token_ids)) + self.num_prompt_logprobs

    @property
    def finished(self) -> bool:
        return None not in self.ends

    def resumption(self) -> EngineRequest:
        """The request that goes on from here."""
        if not self.num_tokens and self.ends.count(None) == len(self.ends):
            return self.request
        return msgspec.structs.replace(
            self.request,
            prior_outputs=tuple(
                PriorOutput(tuple(token_ids), end) for token_ids, end in zip(self.token_ids, self.ends, strict=True)
            ),
            num_prior_prompt_logprobs=self.num_prompt_logprobs,
        )

    def failure(self, message: str) -> list[EngineOutput]:
        """The outputs that end it with an error."""
        outputs = refusal_outputs(self.request, message, None)
        return [output for output in outputs if self.ends[output.index] is None]


@dataclass
class Journal:
    """The unfinished requests, in the order of their arrival. Used by one thread.

    num_told: tokens, and prompt positions that were scored, that all requests so far have been told of."""

    _entries: dict[str, Entry] = field(default_factory=dict)
    num_told: int = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def get(self, request_id: str) -> Entry | None:
        return self._entries.get(request_id)

    def add(self, request: EngineRequest) -> Entry | None:
        """A new entry; None if the id is in use."""
        if request.request_id in self._entries:
            return None
        entry = self._entries[request.request_id] = Entry.of(request)
        return entry

    def remove(self, request_id: str) -> None:
        """Forget a request. Unknown ones are ignored."""
        self._entries.pop(request_id, None)

    def end_sequence(self, request_id: str, index: int) -> None:
        """Nobody wants more of this sequence. Unknown ones are ignored."""
        entry = self._entries.get(request_id)
        if entry is not None and 0 <= index < len(entry.ends):
            entry.ends[index] = entry.ends[index] or "abort"
            if entry.finished:
                self.remove(request_id)

    def note(self, outputs: Iterable[EngineOutput], seen: int) -> list[EngineOutput]:
        """Take in what the process has sent when it had seen so many messages. Returns what is to be passed on: not
        what belongs to an aborted request, even if its id is in use again."""
        passed: list[EngineOutput] = []
        for output in outputs:
            entry = self._entries.get(output.request_id)
            if entry is None or entry.sent is None or seen < entry.sent or entry.ends[output.index] is not None:
                continue
            before = entry.num_tokens
            entry.token_ids[output.index] += output.new_token_ids
            if output.prompt_logprobs:
                entry.num_prompt_logprobs += len(output.prompt_logprobs)
            self.num_told += entry.num_tokens - before
            self._as_first_told(entry, output)
            if output.finish_reason is not None:
                entry.ends[output.index] = output.finish_reason
                if entry.finished:
                    del self._entries[output.request_id]
            passed.append(output)
        return passed

    def _as_first_told(self, entry: Entry, output: EngineOutput) -> None:
        """A resumed request finds less or more in the cache than at first, and starts again: nobody is to see that."""
        if entry.resumed and entry.num_cached_tokens is not None:
            output.num_cached_tokens = entry.num_cached_tokens
            output.first_scheduled_time = None
        if entry.num_cached_tokens is None and (output.new_token_ids or output.prompt_logprobs):
            entry.num_cached_tokens = output.num_cached_tokens
