"""Which launches of the attention kernel the one for Hopper takes over, and how it is launched."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

from llmkit.hookspecs.attention import AttentionLayer
from llmkit.jit.rehearsal import launch
from llmkit_attention.triton_prepare import INTERPRETED, OfStep, base_two
from llmkit_attention.triton_schedule import IntArray, Launch
from llmkit_attention.triton_tiles import Device

logger = logging.getLogger("llmkit.attention")

GLUON_OF = "3.6."
"""Releases of Triton whose Gluon the kernel is written in: its interface changes with every one."""

_TYPES = (torch.bfloat16, torch.float16)
_HEAD_SIZE = 128
_BLOCK_M = 128
_BLOCK_N = 128
_CHUNK = 64
_LEAST_ROUNDS = 3  # of items for every multiprocessor; with fewer, `attention_kernel` is as fast or faster

Attends = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""A layer's attention, called with (query, kv_cache, output)."""


@functools.cache
def hopper_kernel() -> Any:
    """`prompt_kernel`; None where this Triton has no Gluon, or another than the kernel is written in."""
    if INTERPRETED or not triton.__version__.startswith(GLUON_OF):
        return None
    try:
        from llmkit_attention.hopper_kernel import prompt_kernel
    except (ImportError, AttributeError) as error:
        logger.info("no kernel of its own for prompts on Hopper: %s", error)
        return None
    return prompt_kernel


@dataclass(frozen=True)
class _Grid:
    """programs: that take items. blocks: query blocks as they are numbered, some of which have nothing to do."""

    programs: int
    blocks: int


def _grid(query_lens: IntArray, min_tokens: int, layer: AttentionLayer, device: Device) -> _Grid | None:
    """For rows of more than min_tokens tokens; None if they do not keep the GPU busy."""
    block_q = _BLOCK_M * layer.num_kv_heads // layer.num_heads
    lens = query_lens[query_lens > min_tokens]
    items = int((-(-lens // block_q)).sum()) * layer.num_kv_heads
    if items < _LEAST_ROUNDS * device.num_processors:
        return None
    return _Grid(device.num_processors, int(query_lens.sum()) // block_q + len(query_lens))


def _suits(layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor) -> bool:
    """Whether the kernel computes such layers."""
    return (
        layer.head_size == _HEAD_SIZE
        and layer.sliding_window is None
        and layer.soft_cap is None
        and layer.scale > 0
        and 2 * layer.num_heads <= _BLOCK_M * layer.num_kv_heads
        and query.dtype == kv_cache.dtype
        and query.dtype in _TYPES
        and kv_cache.is_contiguous()
        and kv_cache.shape[3] <= _BLOCK_N
    )


class HopperPrompts:
    """What takes over rows of many tokens, as long as it works here."""

    def __init__(self) -> None:
        self._works = True

    def take(
        self,
        planned: Launch,
        layer: AttentionLayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        of_step: OfStep,
        query_lens: IntArray,
        device: Device,
        otherwise: Callable[[], Attends],
    ) -> Attends:
        """What computes the rows of `planned`: `prompt_kernel`, or what `otherwise` makes."""
        if not self._works or planned.one_per_row or device.compute_capability[0] != 9 or hopper_kernel() is None:
            return otherwise()
        grid = _grid(query_lens, planned.min_tokens, layer, device) if _suits(layer, query, kv_cache) else None
        if grid is None:
            return otherwise()
        counter = torch.zeros(1, dtype=torch.int32, device=query.device)  # the step's own: each layer leaves it at 0
        tensors = (counter, of_step.query_start_loc, of_step.seq_lens, of_step.block_table)
        numbers = (
            *(base_two(layer)[0], of_step.block_table.stride(0)),
            *(of_step.num_rows, grid.blocks, planned.min_tokens),
        )
        constants = {
            "GROUP_SIZE": layer.num_heads // layer.num_kv_heads,
            "NUM_KV_HEADS": layer.num_kv_heads,
            "HEAD_SIZE": _HEAD_SIZE,
            "PAGE": kv_cache.shape[3],
            "BLOCK_M": _BLOCK_M,
            "BLOCK_N": _BLOCK_N,
        }
        attend = PromptLaunch((grid.programs, 1, 1), tensors, numbers, constants)
        return self._or(attend, otherwise)

    def _or(self, attend: Attends, otherwise: Callable[[], Attends]) -> Attends:
        """`attend`, until it fails."""
        instead: Attends | None = None

        def call(query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor) -> None:
            nonlocal instead
            if instead is None:
                try:
                    attend(query, kv_cache, output)
                    return
                except Exception as error:
                    self._works = False
                    logger.warning("prompts go to the kernel for all GPUs, as the one for Hopper failed: %s", error)
                    instead = otherwise()
            instead(query, kv_cache, output)

        return call


class PromptLaunch:
    """A launch of `prompt_kernel` with everything but the tensors of the layer. tensors, numbers, constants: its
    arguments, in their order. As with `PreparedLaunch`, layers but the first call the compiled kernel itself."""

    def __init__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[float, ...],
        constants: dict[str, int],
    ) -> None:
        self._grid, self._tensors, self._numbers, self._constants = grid, tensors, numbers, constants
        self._run: Any = None

    def __call__(self, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor) -> None:
        strides = (query.stride(0), query.stride(1), output.stride(0))
        arguments = (query, _descriptor(kv_cache), output, *self._tensors, *strides, *self._numbers)
        aligned = (query.data_ptr() | output.data_ptr()) % 16 == 0
        if aligned and self._run is not None:
            self._run(*arguments, *self._constants.values())
            return
        compiled = launch(hopper_kernel(), self._grid, *arguments, **self._constants, num_warps=4)
        if aligned and compiled is not None:  # not a rehearsal
            self._run = compiled[self._grid]


def _descriptor(kv_cache: torch.Tensor) -> Any:
    """For copies of part of a page's keys or values of one head."""
    descriptor, layout = _of_gluon()
    rows = kv_cache.view(-1, _HEAD_SIZE)
    return descriptor(rows, list(rows.shape), [_HEAD_SIZE, 1], [kv_cache.shape[3], _CHUNK], layout)


@functools.cache
def _of_gluon() -> tuple[Any, Any]:
    """(class of descriptors, how what they copy lies in shared memory)."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor, NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
