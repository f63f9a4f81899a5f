"""The launches of the attention kernel and of the one that combines, with all that they depend on of layer and step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from llmkit.hookspecs.attention import AttentionLayer, SharedPrefixes
from llmkit_attention.triton_combine import combine_kernel
from llmkit_attention.triton_kernels import attention_kernel
from llmkit_attention.triton_launch import PreparedLaunch
from llmkit_attention.triton_prefix import prefix_kernel
from llmkit_attention.triton_schedule import MOST_PREFIX_PARTS, Launch, PrefixLaunch

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels are interpreted on the host; settled when this module is imported."""

ARITHMETIC = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Types of models, and of caches beside FLOAT8, and what products are computed in if both have the same."""

FLOAT8 = torch.float8_e4m3fn
"""What a cache may have besides: all its numbers are numbers of the other types too."""

_LOG2E = 1.4426950408889634
_COMBINED_SPLITS = 16  # splits that the combining kernel loads at once


@dataclass(frozen=True)
class OfStep:
    """What a step brings to all its layers, on the device; see `AttentionBatch`."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    num_rows: int


@dataclass(frozen=True)
class Attend:
    """Launches of one layer after another. prefix: for keys that rows share; combine: for keys that were split."""

    prefix: PreparedLaunch | None
    attend: PreparedLaunch
    combine: PreparedLaunch | None

    def __call__(self, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor) -> None:
        if self.prefix is not None:
            self.prefix(query, kv_cache)
        self.attend(query, kv_cache, output)
        if self.combine is not None:
            self.combine(output)


@dataclass(frozen=True)
class Prefix:
    """What a launch needs to know of keys that rows share. partial, lse: the results of these."""

    launch: PrefixLaunch
    prefixes: SharedPrefixes
    partial: torch.Tensor
    lse: torch.Tensor

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of all kernels that know of prefixes, in the order of their arguments."""
        return len(self.prefixes.group_starts) - 1, self.launch.wanted, self.launch.most_splits


class PrefixMemory:
    """Where results of shared keys are, of all layers and all steps, recorded or not: they run one after another."""

    def __init__(self) -> None:
        self._numbers: dict[torch.device, torch.Tensor] = {}

    def prefix(self, launch: PrefixLaunch, prefixes: SharedPrefixes, layer: AttentionLayer) -> Prefix:
        """What `launch` needs, for layers like this one."""
        rows, device = len(prefixes.members), prefixes.members.device
        results, columns = launch.most_splits * rows * layer.num_heads, padded(layer.head_size)
        numbers = self._numbers.get(device)
        if numbers is None or len(numbers) < results * (columns + 1):
            most = max(results, MOST_PREFIX_PARTS * layer.num_heads)
            numbers = self._numbers[device] = torch.empty(most * (columns + 1), dtype=torch.float32, device=device)
        end = results * columns  # a multiple of 16, as columns are: both begin where kernels can rely on it
        return Prefix(launch, prefixes, numbers[:end], numbers[end : end + results])


def padded(head_size: int) -> int:
    """Columns of a tile."""
    return max(16, triton.next_power_of_2(head_size))


def attention_launches(
    launch: Launch,
    layer: AttentionLayer,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    of_step: OfStep,
    output: torch.Tensor,
    *,
    prefix: Prefix | None = None,
    early: bool = False,
) -> Attend:
    """One launch of the attention kernel with those before and behind it.

    query, output [t, num_heads, head_size], kv_cache [pages, 2, num_kv_heads, page_size, head_size]: types and strides
    of those that the launches will be called with. prefix: what rows share; then their table and lengths
    in `of_step` are still the whole ones. early: whether the kernels may start before the one ahead of them
    has ended.
    """
    before = None
    if prefix is not None:
        before = _prefix_launch(prefix, layer, query, kv_cache, of_step, early=early)
        of_step = replace(of_step, seq_lens=prefix.prefixes.own_lens)
    constants = _shared_constants(launch, layer)
    numbers = _shared_numbers(launch, layer, of_step)
    partial, lse = _workspace(launch, constants["BLOCK_D"], of_step)
    page_size = kv_cache.shape[3]
    factor, cap = base_two(layer)
    attend = PreparedLaunch(
        attention_kernel,
        (launch.num_programs, launch.num_items or launch.num_blocks, launch.num_splits),
        tensors=(
            *(partial, lse, of_step.query_start_loc, of_step.seq_lens, of_step.block_table),
            *_prefix_tensors(prefix, of_step),
        ),
        strides=(query.stride(0), query.stride(1), output.stride(0), *kv_cache.stride()[:3]),
        numbers=(
            *(factor, cap, of_step.block_table.stride(0), page_size.bit_length() - 1),
            *numbers,
            *(prefix.numbers if prefix is not None else (0, 0, 0)),
        ),
        constants=constants
        | {
            "PAGE": page_size if page_size < launch.tile.block_n else 0,
            "COMPUTE": _arithmetic(query.dtype, kv_cache.dtype),
            "CAPPED": layer.soft_cap is not None,
            "FOLDED": layer.soft_cap is None and layer.scale > 0,
            "SPLIT": launch.num_parts > 0,
            "PHASED": launch.tile.phased,
            "EARLY": early,
            "PREFIX_ROWS": prefix.launch.tile_rows if prefix is not None else 0,
        },
        options=launch.tile.options | ({"launch_pdl": True} if early else {}),
    )
    combine = _combine_launch(launch, constants, (partial, lse), of_step, output, numbers, early=early)
    return Attend(before, attend, combine)


def _combine_launch(
    launch: Launch,
    constants: dict[str, Any],
    parts: tuple[torch.Tensor, torch.Tensor],
    of_step: OfStep,
    output: torch.Tensor,
    numbers: tuple[int, ...],
    *,
    early: bool,
) -> PreparedLaunch | None:
    """For the parts of rows whose keys were split, called with (output); None where none were."""
    if not launch.num_parts:
        return None
    return PreparedLaunch(
        combine_kernel,
        (launch.num_programs, launch.num_blocks, launch.block_m),
        tensors=(*parts, of_step.query_start_loc, of_step.seq_lens),
        strides=(output.stride(0),),
        numbers=(*numbers, launch.num_items),
        constants=constants | {"BLOCK_S": _COMBINED_SPLITS, "EARLY": early},
        options={"launch_pdl": True} if early else {},
    )


def _prefix_launch(
    prefix: Prefix,
    layer: AttentionLayer,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    of_step: OfStep,
    *,
    early: bool,
) -> PreparedLaunch:
    """For the keys that rows share; called with (query, kv_cache)."""
    launch, prefixes, page_size = prefix.launch, prefix.prefixes, kv_cache.shape[3]
    factor, cap = base_two(layer)
    return PreparedLaunch(
        prefix_kernel,
        (launch.num_programs, launch.num_items, 1),
        tensors=(
            *(prefix.partial, prefix.lse, of_step.query_start_loc),
            *(prefixes.group_starts, prefixes.members, prefixes.shared_lens, of_step.block_table),
        ),
        strides=(query.stride(0), query.stride(1), *kv_cache.stride()[:3]),
        numbers=(
            *(factor, cap, of_step.block_table.stride(0), page_size.bit_length() - 1, of_step.num_rows),
            *prefix.numbers,
        ),
        constants={
            "GROUP_SIZE": layer.num_heads // layer.num_kv_heads,
            "GROUP": launch.group,
            "PREFIX_ROWS": launch.tile_rows,
            "HEAD_SIZE": layer.head_size,
            "BLOCK_D": padded(layer.head_size),
            "BLOCK_M": launch.block_m,
            "BLOCK_N": launch.tile.block_n,
            "PAGE": page_size if page_size < launch.tile.block_n else 0,
            "COMPUTE": _arithmetic(query.dtype, kv_cache.dtype),
            "CAPPED": layer.soft_cap is not None,
            "FOLDED": layer.soft_cap is None and layer.scale > 0,
            "EARLY": early,
        },
        options=launch.tile.options | ({"launch_pdl": True} if early else {}),
    )


def _prefix_tensors(prefix: Prefix | None, of_step: OfStep) -> tuple[torch.Tensor, ...]:
    """Of the attention kernel, in the order of its arguments."""
    if prefix is None:
        return (of_step.seq_lens,) * 4  # not used
    return prefix.prefixes.group_starts, prefix.prefixes.shared_lens, prefix.partial, prefix.lse


def _shared_numbers(launch: Launch, layer: AttentionLayer, of_step: OfStep) -> tuple[int, ...]:
    """Of both kernels, in the order of their arguments."""
    return (
        of_step.num_rows,
        layer.sliding_window or 0,
        launch.least_span,
        launch.min_tokens,
        launch.max_tokens,
        launch.num_splits,
    )


def _shared_constants(launch: Launch, layer: AttentionLayer) -> dict[str, Any]:
    """Of both kernels, in the order of their arguments."""
    return {
        "GROUP_SIZE": layer.num_heads // layer.num_kv_heads,
        "GROUP": launch.group,
        "BLOCK_Q": launch.block_q,
        "HEAD_SIZE": layer.head_size,
        "BLOCK_D": padded(layer.head_size),
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.tile.block_n,
        "WINDOWED": layer.sliding_window is not None,
        "ITEMS": launch.num_items > 0,
        "ONE_PER_ROW": launch.one_per_row,
    }


def _workspace(launch: Launch, padded_head_size: int, of_step: OfStep) -> tuple[torch.Tensor, torch.Tensor]:
    """(partial results, their log-sum-exps); all layers use them, one after the other."""
    slots = launch.num_parts * launch.num_programs * launch.block_m
    if not slots:
        return of_step.seq_lens, of_step.seq_lens  # not used
    device = of_step.seq_lens.device
    partial = torch.empty((slots, padded_head_size), dtype=torch.float32, device=device)
    return partial, torch.empty(slots, dtype=torch.float32, device=device)


def base_two(layer: AttentionLayer) -> tuple[float, float]:
    """(factor, cap) of the kernel, which works with powers of two: factor times q·k is the score or, with a cap,
    twice the argument of tanh, which the cap then multiplies."""
    if layer.soft_cap is None:
        return layer.scale * _LOG2E, 0.0
    return 2 * _LOG2E * layer.scale / layer.soft_cap, layer.soft_cap * _LOG2E


def product_dtype(dtype: torch.dtype, kv_dtype: torch.dtype) -> torch.dtype:
    """What products are computed in for a model and a cache of these types."""
    return dtype if kv_dtype in (dtype, FLOAT8) else torch.float32


def _arithmetic(dtype: torch.dtype, kv_dtype: torch.dtype) -> tl.dtype:
    """`product_dtype` for kernels. The interpreter multiplies the bit patterns of bfloat16, so not there."""
    product = product_dtype(dtype, kv_dtype)
    return tl.float32 if INTERPRETED and product == torch.bfloat16 else ARITHMETIC[product]
