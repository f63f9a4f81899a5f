"""Blocks for sequences: growth, prefix hits, forks, and prompts kept for forks that are still to come."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from llmkit.kv_cache.manager import KVCacheManager, TableUpdate
from llmkit.kv_cache.prefix_cache import PrefixHit
from llmkit.requests.request import Request


@dataclass(slots=True)
class Start:
    """Where a request that enters can start: the tokens that are in the cache already, and how they got there.

    swapped: they come back from the host.
    """

    num_computed_tokens: int = 0
    hit: PrefixHit | None = None
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    swapped: bool = False


class SequenceMemory:
    """What the scheduler does with the KV cache manager.

    A finished leader whose siblings have not all entered yet keeps its blocks, so that they can be forked from
    it, and a request whose blocks were loaded keeps them until it enters; these are the first to go when memory is
    short. A request that was swapped out keeps its place in the host's memory, and `num_computed_tokens` above 0, while
    it waits.
    """

    def __init__(self, manager: KVCacheManager, give_up_more: Callable[[], bool] = lambda: False) -> None:
        """give_up_more: frees a block that somebody else holds and can do without; False if there is none."""
        self.manager = manager
        self._give_up_more = give_up_more
        self._kept: dict[Request, None] = {}
        self._swapped: dict[Request, None] = {}
        self._copied: list[int] = []

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
        if request in self._swapped:
            return self._swapped_start(request)
        source = request.group.leader
        if source is not request and source.forkable and not request.has_sampled:
            return self._fork(source, request) or self._look_up(request)
        return self._look_up(request)

    def place(self, request: Request, start: Start, num_tokens: int, num_loaded: int = 0) -> bool:
        """Room for `num_tokens` tokens of a request that enters at `start`; `num_loaded` behind that will be loaded.

        False if there is none; the request then holds no blocks. `start` must come from the call before.
        """
        # Prefixes are counted once: not what a preemption, or an engine that has died, makes them look up again.
        first = not (request.counted or request.request.prior_outputs) and request.group.leader is request
        if start.swapped:
            placed = self.manager.swap_in(request, num_tokens)
        else:
            updates = self.manager.allocate(request, num_tokens, start.hit, count_query=first, num_loaded=num_loaded)
            placed = updates is not None
        if not placed:
            self.manager.free(request)
            return False
        request.counted = True
        self._keep_copied(start)
        self.forget_swapped(request)
        request.capacity = self.manager.capacity(request)
        request.commit_at = self.manager.next_commit(request)
        return True

    def _keep_copied(self, start: Start) -> None:
        """What a fork copies must stay until the plan is done: a sequence that comes back from the host in the same
        plan could otherwise be given the block of a parent that ends with its last fork, and be copied there first."""
        if start.block_copies:
            sources = [source for source, _ in start.block_copies]
            self._copied += sources
            self.manager.hold(sources)

    def planned(self) -> None:
        """A plan has been made: what it copies need not be kept any longer."""
        if self._copied:
            self.manager.release(self._copied)
            self._copied = []

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
        """Give back the blocks of `request`, here and on the host; nothing happens if it has none."""
        self._kept.pop(request, None)
        self.forget_swapped(request)
        self.manager.free(request)
        request.capacity = 0

    def swap_out(self, request: Request) -> bool:
        """Move the blocks of a running request to the host, with the next plan; False if there is no room."""
        computed = request.num_computed_tokens
        if request.request.pooling is not None:
            return False  # what was pooled of it is not kept
        if not computed or not self.manager.swap_out(request, computed):
            return False
        self._swapped[request] = None
        request.capacity = 0
        return True

    def is_swapped(self, request: Request) -> bool:
        return request in self._swapped

    def swapped(self, hosts: Collection[int] | None = None) -> list[Request]:
        """The requests that are swapped out; with `hosts`, only those that have one of these host blocks."""
        space = self.manager.swap_space
        return [request for request in self._swapped if hosts is None or space.holds_any(request.sequence_id, hosts)]

    def forget_swapped(self, request: Request) -> None:
        """Give up what the host has of `request`; nothing happens if it has nothing."""
        if request in self._swapped:
            del self._swapped[request]
            request.num_computed_tokens = 0
            self.manager.swap_space.drop(request.sequence_id)

    def give_up_kept(self) -> bool:
        """Free blocks that are only kept, those kept last; False if there are none."""
        if not self._kept:
            return self._give_up_more()
        self.free(next(reversed(self._kept)))
        return True

    def _swapped_start(self, request: Request) -> Start:
        saved = request.num_computed_tokens
        found = self._look_up(request)
        # Meanwhile others may have computed more of the same tokens than this one had.
        return found if found.num_computed_tokens > saved else Start(saved, swapped=True)

    def _look_up(self, request: Request) -> Start:
        # Scores and means of prompt tokens come from computing them, so a prefix hit would lose them.
        if request.needs_whole_prompt:
            return Start()
        hit = self.manager.lookup(request)
        return Start(hit.num_tokens, hit)

    def _fork(self, source: Request, request: Request) -> Start | None:
        # The last prompt token is computed again: its output is what the fork samples from, with its own seed.
        shared = request.num_prompt_tokens - 1
        copies = self.manager.fork(source, request, shared)
        return None if copies is None else Start(shared, None, copies)
