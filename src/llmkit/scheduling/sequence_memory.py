"""Blocks for sequences: growth, prefix hits, forks, and prompts kept for forks that are still to come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from llmkit.kv_cache.manager import KVCacheManager, TableUpdate
from llmkit.kv_cache.prefix_cache import PrefixHit
from llmkit.requests.request import Request


@dataclass(slots=True)
class Start:
    """Where a request that enters can start: the tokens that are in the cache already, and how they got there."""

    num_computed_tokens: int = 0
    hit: PrefixHit | None = None
    block_copies: list[tuple[int, int]] = field(default_factory=list)


class SequenceMemory:
    """What the scheduler does with the KV cache manager.

    A finished leader whose siblings have not all entered yet keeps its blocks, so that they can be forked from
    it, and a request whose blocks were loaded keeps them until it enters; these are the first to go when memory is
    short.
    """

    def __init__(self, manager: KVCacheManager, give_up_more: Callable[[], bool] = lambda: False) -> None:
        """give_up_more: frees a block that somebody else holds and can do without; False if there is none."""
        self.manager = manager
        self._give_up_more = give_up_more
        self._kept: dict[Request, None] = {}

    def grow(self, request: Request, num_tokens: int) -> list[TableUpdate] | None:
        """Room for `num_tokens` tokens of a running request; None if somebody would have to be preempted."""
        while True:
            updates = self.manager.allocate(request, num_tokens)
            if updates is not None:
                request.capacity = self.manager.capacity(request)
                return updates
            if not self.give_up_kept():
                return None

    def start(self, request: Request) -> Start:
        """Find what `request`, which waits, need not compute. A fork takes blocks, see `place`."""
        if request in self._kept:
            self.free(request)  # what was loaded is found in the cache, as nobody has taken a block since
        source = request.group.leader
        if source is not request and source.forkable and not request.has_sampled:
            return self._fork(source, request) or self._look_up(request)
        return self._look_up(request)

    def place(self, request: Request, start: Start, num_tokens: int, num_loaded: int = 0) -> bool:
        """Room for `num_tokens` tokens of a request that enters at `start`; `num_loaded` behind that will be loaded.

        False if there is none; the request then holds no blocks. `start` must come from the call before.
        """
        first = not request.counted and request.group.leader is request
        updates = self.manager.allocate(request, num_tokens, start.hit, count_query=first, num_loaded=num_loaded)
        if updates is None:
            self.manager.free(request)
            return False
        request.counted = True
        request.capacity = self.manager.capacity(request)
        request.commit_at = self.manager.next_commit(request)
        return True

    def commit(self, request: Request, num_computed_tokens: int) -> None:
        """The first `num_computed_tokens` tokens of a running request have been computed."""
        self.manager.commit(request, num_computed_tokens)
        request.commit_at = self.manager.next_commit(request)

    def loaded(self, request: Request, num_tokens: int) -> None:
        """The first `num_tokens` tokens of a request that waits are in its blocks; they stay until it enters."""
        self.manager.commit(request, num_tokens)
        self._kept[request] = None
        request.capacity = 0

    def keep(self, request: Request) -> None:
        """`request` has ended, but its blocks stay for forks."""
        self._kept[request] = None

    def free(self, request: Request) -> None:
        """Give back the blocks of `request`; nothing happens if it has none."""
        self._kept.pop(request, None)
        self.manager.free(request)
        request.capacity = 0

    def give_up_kept(self) -> bool:
        """Free blocks that are only kept, those kept last; False if there are none."""
        if not self._kept:
            return self._give_up_more()
        self.free(next(reversed(self._kept)))
        return True

    def _look_up(self, request: Request) -> Start:
        # Scores of prompt tokens come from computing them, so a prefix hit would lose them.
        if request.wants_prompt_logprobs:
            return Start()
        hit = self.manager.lookup(request)
        return Start(hit.num_tokens, hit)

    def _fork(self, source: Request, request: Request) -> Start | None:
        # The last prompt token is computed again: its output is what the fork samples from, with its own seed.
        shared = request.num_prompt_tokens - 1
        copies = self.manager.fork(source, request, shared)
        return None if copies is None else Start(shared, None, copies)
