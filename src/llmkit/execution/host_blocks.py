"""The swap space: host memory for the KV blocks of preempted sequences, and the copies there and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from llmkit.mapped_memory import lazy_zeros

STAGED_BYTES = 64 << 20
"""Device memory that a copy takes at most, unless a single block is larger."""

Pairs = Sequence[tuple[int, int]]


class HostBlocks:
    """`num_blocks` blocks of `block_bytes` bytes for each of `num_tensors` tensors.

    On the host a block's bytes of all tensors lie side by side, and on the device they are gathered into one buffer
    first: one transfer for a run of consecutive host blocks, however scattered the device's are and however many
    tensors there are. For a GPU the memory is pinned, and copies run on the current stream in the order of the calls,
    so what is queued before them has been done and what comes after them waits. For the CPU, memory is committed as
    blocks are written.
    """

    def __init__(self, num_blocks: int, block_bytes: int, num_tensors: int, device: torch.device) -> None:
        self._memory = _host_bytes((num_blocks, num_tensors, block_bytes), device)
        self._device = device
        self._staged = max(1, STAGED_BYTES // max(1, num_tensors * block_bytes))

    def swap_out(self, tensors: Sequence[torch.Tensor], pairs: Pairs) -> None:
        """Copy (device block, host block) pairs from `tensors`, each uint8[blocks, block_bytes], to the host."""
        for part in self._parts(pairs):
            blocks, staging = self._stage(part)
            for i, tensor in enumerate(tensors):
                staging[:, i] = tensor[blocks]
            for first, last, host in _runs(part):
                self._memory[host : host + last - first].copy_(staging[first:last], non_blocking=True)

    def swap_in(self, tensors: Sequence[torch.Tensor], pairs: Pairs) -> None:
        """Copy (device block, host block) pairs from the host to `tensors`."""
        for part in self._parts(pairs):
            blocks, staging = self._stage(part)
            for first, last, host in _runs(part):
                staging[first:last].copy_(self._memory[host : host + last - first], non_blocking=True)
            for i, tensor in enumerate(tensors):
                tensor[blocks] = staging[:, i]

    def _parts(self, pairs: Pairs) -> Iterator[Pairs]:
        """The pairs by host block, as many at a time as may be staged."""
        ordered = sorted(pairs, key=lambda pair: pair[1])
        for start in range(0, len(ordered), self._staged):
            yield ordered[start : start + self._staged]

    def _stage(self, part: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        """(device blocks as an index int64[n], buffer uint8[n, tensors, block_bytes])."""
        blocks = torch.tensor([block for block, _ in part], device=self._device)
        return blocks, torch.empty((len(part), *self._memory.shape[1:]), dtype=torch.uint8, device=self._device)


def _runs(part: Pairs) -> Iterator[tuple[int, int, int]]:
    """(first, last + 1, host block of the first) of each run of consecutive host blocks in `part`."""
    first = 0
    for end in range(1, len(part) + 1):
        if end == len(part) or part[end][1] != part[end - 1][1] + 1:
            yield first, end, part[first][1]
            first = end


def _host_bytes(shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.from_numpy(lazy_zeros(shape, np.uint8))
    return torch.empty(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
