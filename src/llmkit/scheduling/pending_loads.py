"""Loads under way: which blocks they write to, which of them have failed, and who waits for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from llmkit.hookspecs.connector import Load
from llmkit.kv_cache.block_pool import NULL_BLOCK
from llmkit.requests.request import Request


@dataclass(slots=True, eq=False)
class PendingLoad:
    """A load that a connector has been told of.

    load: as the connector knows it. request: None once nobody waits for it. columns: block → column of its sequence,
    for the blocks that it writes to. hashes: contents that it brings. deadline: until when it is waited for.
    """

    load: Load
    request: Request | None
    columns: dict[int, int]
    hashes: frozenset[bytes]
    deadline: float
    failed: set[int] = field(default_factory=set)

    @property
    def load_id(self) -> int:
        return self.load.load_id

    @property
    def asynchronous(self) -> bool:
        return self.load.asynchronous

    def fail(self) -> None:
        """None of its blocks holds anything usable."""
        self.failed.update(self.columns)

    def num_usable_tokens(self, block_size: int) -> int:
        """Tokens from the start of the sequence that are in the cache now that the load has ended: up to the first
        block that failed."""
        if not self.failed:
            return self.load.first_token + self.load.num_tokens
        return min(self.columns[block] for block in self.failed) * block_size


@dataclass(frozen=True, slots=True)
class EndedLoad:
    """A load that is over for `request`, of which the first `num_tokens` tokens are in its blocks now."""

    request: Request
    num_tokens: int
    failed: bool
    asynchronous: bool


class PendingLoads:
    """The record of loads under way. New ones are begun while a step is planned, and sent with it; synchronous ones
    end with their step, the others when they are reported, whether somebody still waits for them or not."""

    def __init__(self) -> None:
        self._new: list[PendingLoad] = []
        self._of_step: dict[int, list[PendingLoad]] = {}
        self._by_id: dict[int, PendingLoad] = {}
        self._waited_for: dict[Request, PendingLoad] = {}
        self._hashes: set[bytes] = set()

    def __len__(self) -> int:
        """Those under way."""
        return len(self._new) + len(self._by_id) + sum(map(len, self._of_step.values()))

    def __contains__(self, request: Request) -> bool:
        """Whether `request` waits for an asynchronous load."""
        load = self._waited_for.get(request)
        return load is not None and load.asynchronous

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an asynchronous load."""
        return sum(load.asynchronous for load in self._waited_for.values())

    @property
    def asynchronous(self) -> Iterator[PendingLoad]:
        """Those that have been sent and have not ended."""
        return iter(list(self._by_id.values()))

    @property
    def num_abandoned_blocks(self) -> int:
        """Blocks of loads that nobody waits for."""
        return sum(len(load.columns) for load in self._by_id.values() if load.request is None)

    @property
    def unfinished(self) -> list[PendingLoad]:
        """Those that do not end with a step that has been sent."""
        return [*self._new, *self._by_id.values()]

    def forget_steps(self) -> None:
        """No step is under way any more."""
        for loads in self._of_step.values():
            for load in loads:
                self._forget(load)
        self._of_step.clear()

    @property
    def has_new(self) -> bool:
        """Whether there are loads to be sent with the next step."""
        return bool(self._new)

    def begin(self, load: PendingLoad) -> None:
        """`load` is to be sent with the step that is being planned."""
        assert load.request is not None
        self._new.append(load)
        self._waited_for[load.request] = load
        self._hashes |= load.hashes

    def brings(self, block_hash: bytes) -> bool:
        """Whether a load that somebody waits for brings this content."""
        return block_hash in self._hashes

    def send_new(self, step: int) -> list[PendingLoad]:
        """Those that go with `step`."""
        new, self._new = self._new, []
        for load in new:
            if load.asynchronous:
                self._by_id[load.load_id] = load
            else:
                self._of_step.setdefault(step, []).append(load)
        return new

    def fail(self, blocks: Collection[int], sync: Iterable[PendingLoad]) -> set[int]:
        """These blocks hold nothing usable. Returns those that neither a load of `sync` nor an asynchronous one
        writes to."""
        unknown = set(blocks)
        for load in [*self._by_id.values(), *sync]:
            hit = load.columns.keys() & blocks
            load.failed |= hit
            unknown -= hit
        return unknown

    def find(self, load_id: int) -> PendingLoad | None:
        """The asynchronous load of this id; None if there is none."""
        return self._by_id.get(load_id)

    def of_step(self, step: int) -> list[PendingLoad]:
        """The synchronous loads of a step that is on its way."""
        return self._of_step.get(step, [])

    def take_step(self, step: int) -> list[PendingLoad]:
        """The synchronous loads of a step that is over; to be followed by `end` for each."""
        return self._of_step.pop(step, [])

    def end(self, load: PendingLoad) -> None:
        """`load` writes no more."""
        self._by_id.pop(load.load_id, None)
        self._forget(load)

    def let_go(self, load: PendingLoad) -> None:
        """Nobody waits for `load` any more, but it still writes."""
        self._forget(load)
        load.request = None

    def of(self, request: Request) -> PendingLoad | None:
        """The load that `request` waits for."""
        return self._waited_for.get(request)

    def _forget(self, load: PendingLoad) -> None:
        if load.request is not None and self._waited_for.get(load.request) is load:
            del self._waited_for[load.request]
            self._hashes = {h for other in self._waited_for.values() for h in other.hashes}


def written_columns(tables: Iterable[Iterable[int]], first_column: int) -> dict[int, int]:
    """Block → column of the blocks that a load from `first_column` on writes to."""
    return {
        block: column
        for table in tables
        for column, block in enumerate(table)
        if column >= first_column and block != NULL_BLOCK
    }
