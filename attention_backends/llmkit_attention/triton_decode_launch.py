"""The launch of the decode kernel: which batches it is for, block sizes, splits, and memory for these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton

from llmkit_attention.triton_decode import decode_kernel
from llmkit_attention.triton_launch import PreparedLaunch
from llmkit_attention.triton_prepare import ARITHMETIC, INTERPRETED, OfStep, base_two
from llmkit_attention.triton_tiles import Device

if TYPE_CHECKING:
    from llmkit.hookspecs.attention import AttentionLayer, Rotation

_MOST_HEADS = 7  # query heads of a KV head: with its new key they fill a tile
_LARGEST_ROW = 256  # bytes of a key
# The interpreter cuts bfloat16 off instead of rounding; exact float32 has no matrix units.
_TYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.bfloat16, torch.float16)
_PARTS = 4  # splits that are combined at once
_MOST_ROWS, _MOST_KEYS = 16, 1024


@dataclass(frozen=True)
class DecodeTile:
    """How one program works.

    first, second (or 0): keys that it loads before it waits; block_n: at a time after these. num_warps, num_stages: as
    Triton understands them. least_span: keys of a split, at least, a multiple of block_n. programs_per_processor: how
    many there should be before keys are split no further. asks: whether keys behind the first ones are asked for before
    the wait.
    """

    first: int
    second: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 3
    least_span: int = 192
    programs_per_processor: int = 2
    asks: bool = True

    def splits(self, programs: int, longest: int, device: Device) -> int:
        """Of the keys of rows with so many programs, where the longest row has so many keys."""
        most = device.num_processors * self.programs_per_processor // programs
        return max(1, min(most, -(-longest // self.least_span)))


ChooseDecodeTile = Callable[[int, int, int, Device], DecodeTile | None]
"""(rows, keys of the longest, bytes of a key, device) → block sizes; None where several launches are faster."""


def decode_tile_for(rows: int, longest: int, row_bytes: int, device: Device) -> DecodeTile | None:
    """As measured on an H200: not for other generations, nor for heads wider than those of 128 in 16 bits."""
    if rows > _MOST_ROWS or longest > _MOST_KEYS or row_bytes > _LARGEST_ROW or device.compute_capability[0] != 9:
        return None
    return DecodeTile(128, 64, 64)


class DecodeMemory:
    """What has to be zero between launches, for all layers and all steps: they run one after another."""

    def __init__(self) -> None:
        self._counters: dict[torch.device, torch.Tensor] = {}

    def counters(self, count: int, device: torch.device) -> torch.Tensor:
        """int32[count or more], zeros whenever no kernel runs."""
        counters = self._counters.get(device)
        if counters is None or len(counters) < count:
            counters = self._counters[device] = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
        return counters


def takes(
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation,
    kv_cache: torch.Tensor,
) -> bool:
    """Whether the kernel can do it for such a layer and such tensors."""
    size, norms = layer.head_size, rotation.norms
    return (
        query.dtype in _TYPES
        and query.dtype == key.dtype == value.dtype == kv_cache.dtype
        and size >= 16
        and size & (size - 1) == 0
        and layer.num_heads // layer.num_kv_heads <= _MOST_HEADS
        and rotation.cos_sin.shape[-1] == size
        and rotation.cos_sin.is_contiguous()
        and all(x.stride(-1) == 1 for x in (query, key, value, kv_cache))
        and kv_cache.stride(3) == size
        and (norms is None or (norms.query.dtype in ARITHMETIC and norms.key.dtype == norms.query.dtype))
    )


def decode_launch(
    tile: DecodeTile,
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation,
    kv_cache: torch.Tensor,
    of_step: OfStep,
    slots: torch.Tensor,
    longest: int,
    device: Device,
    memory: DecodeMemory,
    *,
    early: bool,
) -> PreparedLaunch:
    """The launch for steps like this one, to be called with (query, key, value, kv_cache, output, weights of the norms
    of queries and of keys, positions, cos_sin), where the weights may be anything if there are no norms.

    For types and strides: see `AttentionBackend.attend_projected`; output [rows, num_heads, head_size] is dense.
    longest: keys of the longest row. early: whether it may start before the kernel ahead of it has ended.
    """
    rows, size = of_step.num_rows, layer.head_size
    programs, group = rows * layer.num_kv_heads, layer.num_heads // layer.num_kv_heads
    num_splits = tile.splits(programs, longest, device)
    parts = rows * layer.num_heads * num_splits if num_splits > 1 else 0
    place, (factor, cap) = query.device, base_two(layer)
    return PreparedLaunch(
        decode_kernel,
        (layer.num_kv_heads, rows, num_splits),
        tensors=(
            torch.empty(parts * size, dtype=torch.float32, device=place),
            torch.empty(parts, dtype=torch.float32, device=place),
            memory.counters(programs, place),
            *(of_step.seq_lens, of_step.block_table, slots),
        ),
        strides=(query.stride(0), key.stride(0), value.stride(0), *kv_cache.stride()[:3]),
        numbers=(
            *(factor, cap, 0.0 if rotation.norms is None else rotation.norms.eps),
            *(of_step.block_table.stride(0), kv_cache.shape[3].bit_length() - 1, layer.sliding_window or 0),
            *(tile.least_span, num_splits),
        ),
        constants={
            "GROUP": group,
            "ROWS": max(4, triton.next_power_of_2(group + 1)),
            "HEAD_SIZE": size,
            "FIRST": tile.first,
            "SECOND": tile.second,
            "BLOCK_N": tile.block_n,
            "STAGES": tile.num_stages,
            "PARTS": _PARTS,
            "NORMED": rotation.norms is not None,
            "WINDOWED": layer.sliding_window is not None,
            "CAPPED": layer.soft_cap is not None,
            "EARLY": early,
            "ASKS": early and tile.asks,
        },
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages} | ({"launch_pdl": True} if early else {}),
    )
