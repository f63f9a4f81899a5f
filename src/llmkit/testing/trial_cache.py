"""KV tensors of any layout whose blocks hold what can be checked, and their books."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch

from llmkit.kv_cache.groups import make_group_managers
from llmkit.kv_cache.layout import KVCacheLayout


class TrialCache:
    """What a block holds is a function of group and content hash, so every loaded block can be checked. Blocks that are
    given back are overwritten at once."""

    def __init__(self, layout: KVCacheLayout, device: str = "cpu") -> None:
        self.layout = layout
        self.tensors = self._make_tensors(device)
        self._free = list(range(1, layout.num_blocks))
        self._findable: dict[tuple[int, bytes], int] = {}

    def _make_tensors(self, device: str) -> list[torch.Tensor]:
        """One for each layer; layers of different groups share storage, as in the engine."""
        layout, tensor_of, group_of = self.layout, self.layout.tensor_of_layer(), self.layout.group_of_layer()
        spec = layout.groups[0].spec
        shape = (layout.num_blocks * layout.pages_per_block, 2, spec.num_kv_heads, layout.page_size, spec.head_size)
        storages = [torch.zeros(shape, dtype=spec.dtype, device=device) for _ in range(layout.num_tensors)]
        return [storages[tensor_of[layer]] for layer in sorted(group_of)]

    # Blocks

    def take(self, num_columns: int, num_loaded: int = 0) -> tuple[tuple[int, ...], ...]:
        """A table for each group; null blocks where a window will have left before `num_loaded` tokens end."""
        managers = make_group_managers(self.layout.groups, self.layout.block_size)
        firsts = [manager.first_needed(num_loaded) if num_loaded else 0 for manager in managers]
        return tuple(
            tuple(0 if column < first else self._free.pop() for column in range(num_columns)) for first in firsts
        )

    def give_back(self, blocks: Iterable[int]) -> None:
        """These blocks are reused for something else."""
        for block in set(blocks) - {0} - set(self._free):
            self.write(block, None)
            self._free.append(block)
            self._findable = {content: other for content, other in self._findable.items() if other != block}

    def is_free(self, block: int) -> bool:
        return block in self._free

    def fill(self, block: int, group: int, content: bytes) -> None:
        """A block is computed: it holds this content, and is findable until it is given back."""
        self.write(block, (group, content))
        self._findable[group, content] = block

    def cached_block(self, group: int, block_hash: bytes) -> int | None:
        """As `llmkit.hookspecs.connector.StepView.cached_block`."""
        return self._findable.get((group, block_hash))

    # Bytes

    def pages(self, layer: int, block: int) -> torch.Tensor:
        count = self.layout.pages_per_block
        return self.tensors[layer][block * count : (block + 1) * count]

    def write(self, block: int, content: tuple[int, bytes] | None) -> None:
        """The bytes of a group's content, or garbage, into a block."""
        tensors = self.layout.tensor_of_layer()
        layers = self.layout.groups[content[0]].layers if content else sorted(tensors)
        for layer in layers:
            self.pages(layer, block).copy_(self._bytes(layer, content[1]) if content else torch.tensor(-3.0))

    def holds_content(self, block: int, group: int, content: bytes) -> bool:
        return all(
            torch.equal(self.pages(layer, block).cpu(), self._bytes(layer, content))
            for layer in self.layout.groups[group].layers
        )

    def _bytes(self, layer: int, content: bytes) -> torch.Tensor:
        shape = self.pages(layer, 0).shape
        seed = hashlib.blake2b(content + bytes([layer]), digest_size=4).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "little"))
        return torch.rand(math.prod(shape), generator=generator).view(shape).to(self.tensors[layer].dtype)
