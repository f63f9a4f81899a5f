"""The swap space: host memory for the KV blocks of preempted sequences, and the copies there and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from llmkit.mapped_memory import lazy_zeros


class HostBlocks:
    """`num_blocks` blocks of `block_bytes` bytes for each of `num_tensors` tensors.

    For a GPU the memory is pinned, and copies run on the current stream in the order of the calls, so what is queued
    before them has been done and what comes after them waits. For the CPU, memory is committed as blocks are written.
    """

    def __init__(self, num_blocks: int, block_bytes: int, num_tensors: int, device: torch.device) -> None:
        self._storages = [_host_bytes(num_blocks, block_bytes, device) for _ in range(num_tensors)]

    def swap_out(self, tensors: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (device block, host block) pairs from `tensors`, each uint8[blocks, block_bytes], to the host."""
        for blocks, hosts in _runs(pairs, tensors):
            for tensor, storage in zip(tensors, self._storages, strict=True):
                storage[hosts].copy_(tensor[blocks], non_blocking=True)

    def swap_in(self, tensors: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (device block, host block) pairs from the host to `tensors`."""
        for blocks, hosts in _runs(pairs, tensors):
            for tensor, storage in zip(tensors, self._storages, strict=True):
                tensor[blocks] = storage[hosts].to(tensor.device, non_blocking=True)


def _runs(pairs: Sequence[tuple[int, int]], tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, slice]]:
    """The pairs by runs of consecutive host blocks: device blocks as an index tensor, host blocks as a slice.

    A run is one transfer per tensor, however its device blocks are scattered.
    """
    if not pairs or not tensors:
        return
    ordered = sorted(pairs, key=lambda pair: pair[1])
    start = 0
    for end in range(1, len(ordered) + 1):
        if end == len(ordered) or ordered[end][1] != ordered[end - 1][1] + 1:
            blocks = torch.tensor([block for block, _ in ordered[start:end]], device=tensors[0].device)
            yield blocks, slice(ordered[start][1], ordered[end - 1][1] + 1)
            start = end


def _host_bytes(num_blocks: int, block_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.from_numpy(lazy_zeros((num_blocks, block_bytes), np.uint8))
    return torch.empty((num_blocks, block_bytes), dtype=torch.uint8, pin_memory=device.type == "cuda")
