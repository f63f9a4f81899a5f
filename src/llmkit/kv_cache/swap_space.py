"""Blocks of preempted sequences in host memory: what each host block holds, and the copies that are due.

The copies themselves are the executor's: `take_copies` gives the (device block, host block) pairs that the next step
plan carries. All steps are executed in the order of their plans, so a host block that was given up can be promised to
another sequence at once; only one that the plan being made still reads has to rest until that plan is built.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from llmkit.kv_cache.block_pool import IntegrityError
from llmkit.kv_cache.hashing import HashChain
from llmkit.kv_cache.sequence_blocks import SequenceBlocks

BlockPair = tuple[int, int]
"""(device block, host block)."""

Content = tuple[int, bytes]
"""(KV group, content hash)."""


@dataclass(frozen=True, slots=True)
class SwappedBlocks:
    """What the host has of one sequence.

    num_computed: tokens whose keys and values are there. tables: per group, host block of each column from
    `first_kept[group]` on. num_committed, chain: as in SequenceBlocks, when the sequence was swapped out.
    """

    num_computed: int
    tables: tuple[list[int], ...]
    first_kept: list[int]
    num_committed: int
    chain: HashChain | None


class SwapSpace:
    """Owns the host blocks 0..num_blocks-1.

    Blocks with the same known content are kept once, however many sequences were swapped out with them, so that a
    prefix that many share takes room once.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))
        self._resting: list[int] = []
        self._references = [0] * num_blocks
        self._contents: dict[int, Content] = {}
        self._index: dict[Content, int] = {}
        self._swapped: dict[str, SwappedBlocks] = {}
        self._out: dict[int, int] = {}  # host block → device block
        self._in: list[BlockPair] = []

    @property
    def num_free(self) -> int:
        """Host blocks that hold nothing; those that the plan being made reads are not among them."""
        return len(self._free)

    def __len__(self) -> int:
        """How many sequences are swapped out."""
        return len(self._swapped)

    def get(self, sequence_id: str) -> SwappedBlocks | None:
        """What the host has of a sequence; None if nothing."""
        return self._swapped.get(sequence_id)

    def store(self, sequence_id: str, state: SequenceBlocks, num_computed: int, block_size: int) -> bool:
        """Have the blocks of the first `num_computed` tokens of a sequence copied to the host by the next plan.

        False, with nothing changed, if there is no room. Raises ValueError if the sequence is there already.
        """
        if sequence_id in self._swapped:
            raise ValueError(f"sequence {sequence_id} has been swapped out already")
        end = -(-num_computed // block_size)
        known = min(end, state.num_committed) if state.chain is not None else 0
        tables: list[list[int]] = []
        missing: list[tuple[list[int], int, int, Content | None]] = []
        for group, (table, first) in enumerate(zip(state.tables, state.first_kept, strict=True)):
            hosts: list[int] = []
            for column in range(first, end):
                content = (group, state.chain.hashes[column]) if state.chain and column < known else None
                host = self._index.get(content, -1) if content is not None else -1
                if host < 0:
                    missing.append((hosts, len(hosts), table[column], content))
                hosts.append(host)
            tables.append(hosts)
        if len(missing) > len(self._free):
            return False
        for hosts, place, block, content in missing:
            hosts[place] = self._take(block, content)
        for hosts in tables:
            for host in hosts:
                self._references[host] += 1
        self._swapped[sequence_id] = SwappedBlocks(
            num_computed, tuple(tables), list(state.first_kept), state.num_committed, state.chain
        )
        return True

    def load(self, sequence_id: str, copies: Iterable[BlockPair]) -> None:
        """A sequence comes back: `copies`, of blocks that the host has of it, go into the next plan."""
        self._in += copies
        self._resting += self._release(sequence_id)

    def drop(self, sequence_id: str) -> None:
        """Forget what the host has of a sequence; nothing happens if it has nothing."""
        if sequence_id not in self._swapped:
            return
        read = {host for _, host in self._in}
        for host in self._release(sequence_id):
            if host in read:
                self._resting.append(host)
            else:
                self._out.pop(host, None)
                heapq.heappush(self._free, host)

    def holds_any(self, sequence_id: str, hosts: Collection[int]) -> bool:
        """Whether a swapped sequence has one of these host blocks."""
        saved = self._swapped.get(sequence_id)
        return saved is not None and any(host in hosts for table in saved.tables for host in table)

    def take_copies(self) -> tuple[list[BlockPair], list[BlockPair]]:
        """(out, in): the copies since the last time, for a plan that carries out the first ones first."""
        out, self._out = [(block, host) for host, block in self._out.items()], {}
        back, self._in = self._in, []
        for host in self._resting:
            heapq.heappush(self._free, host)
        self._resting = []
        return out, back

    def check_integrity(self) -> None:
        """Recount everything. Raises IntegrityError that names the first disagreement."""
        held = Counter(host for saved in self._swapped.values() for table in saved.tables for host in table)
        for host, count in enumerate(self._references):
            if count != held[host]:
                raise IntegrityError(f"host block {host} counts {count} references, {held[host]} tables hold it")
        idle = [*self._free, *self._resting]
        if sorted([*idle, *held]) != list(range(self.num_blocks)):
            raise IntegrityError(f"of {self.num_blocks} host blocks {len(held)} are held and {len(idle)} are not")
        if {content: host for host, content in self._contents.items()} != self._index:
            raise IntegrityError("the index of host blocks and their contents differ")
        if not self._contents.keys() <= held.keys():
            raise IntegrityError("a host block that nobody holds has content")
        if not {*self._out, *(host for _, host in self._in)} <= held.keys() | set(self._resting):
            raise IntegrityError("a host block is about to be copied but was given away")

    def _take(self, block: int, content: Content | None) -> int:
        host = heapq.heappop(self._free)
        self._out[host] = block
        if content is not None:
            self._contents[host] = content
            self._index[content] = host
        return host

    def _release(self, sequence_id: str) -> list[int]:
        """One reference less to each block of a sequence; those that nobody holds any more."""
        idle = []
        for table in self._swapped.pop(sequence_id).tables:
            for host in table:
                self._references[host] -= 1
                if not self._references[host]:
                    idle.append(host)
        for host in idle:
            self._forget(host)
        return idle

    def _forget(self, host: int) -> None:
        content = self._contents.pop(host, None)
        if content is not None:
            del self._index[content]
