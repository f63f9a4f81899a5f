"""What a step begins with, in one launch: tokens in the place of placeholders, and what rows are drawn by."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmkit.jit.chain import follows_early, next_may_start, wait_for_last
from llmkit.jit.rehearsal import launch, rehearsing
from llmkit.sampling.device_draw import DeviceTruncation, DrawParameters

_BLOCK = 256


@triton.jit(do_not_specialize=["tokens", "rows"])
def enter_kernel(
    ids_ptr, last_ptr, slots_ptr, seeds_ptr, temperatures_ptr, min_p_ptr, top_k_ptr, top_p_ptr,
    ids_out, seeds_out, temperatures_out, min_p_out, top_k_out, top_p_out, tokens, rows,
    TRUNCATED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK of a step's tokens and as many of the rows that are drawn for."""
    if EARLY:
        next_may_start()
        wait_for_last()
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + index, mask=index < tokens, other=0)
    row = index < rows
    slot = tl.load(slots_ptr + index, mask=row, other=0)
    stands_for = tl.load(last_ptr + (-1 - token), mask=(index < tokens) & (token < 0), other=0)
    tl.store(ids_out + index, tl.where(token < 0, stands_for, token), mask=index < tokens)
    tl.store(seeds_out + index, tl.load(seeds_ptr + slot, mask=row), mask=row)
    tl.store(temperatures_out + index, tl.load(temperatures_ptr + slot, mask=row), mask=row)
    tl.store(min_p_out + index, tl.load(min_p_ptr + slot, mask=row), mask=row)
    if TRUNCATED:
        tl.store(top_k_out + index, tl.load(top_k_ptr + slot, mask=row), mask=row)
        tl.store(top_p_out + index, tl.load(top_p_ptr + slot, mask=row), mask=row)


def enter_step(
    input_ids: torch.Tensor, last_tokens: torch.Tensor, slots: torch.Tensor, parameters: DrawParameters
) -> tuple[torch.Tensor, DrawParameters]:
    """See `KernelTable.enter_step`; all dense."""
    tokens, rows = len(input_ids), len(slots)
    cut = parameters.truncation
    of_slots = [parameters.seeds, parameters.temperatures, parameters.log_min_p]
    of_slots += [parameters.seeds, parameters.seeds] if cut is None else [cut.top_k, cut.top_p]
    ids = torch.zeros_like(input_ids) if rehearsing() else torch.empty_like(input_ids)
    of_rows = [
        torch.empty(rows, dtype=array.dtype, device=array.device) for array in of_slots[: 3 if cut is None else 5]
    ]
    early = follows_early(input_ids.device)
    if tokens or rows:
        launch(
            enter_kernel, (triton.cdiv(max(tokens, rows), _BLOCK),),
            input_ids, last_tokens, slots, *of_slots, ids, *of_rows, *([ids, ids] if cut is None else []), tokens, rows,
            TRUNCATED=cut is not None, BLOCK=_BLOCK, EARLY=early, num_warps=4,
            **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    truncation = None if cut is None else DeviceTruncation(of_rows[3], of_rows[4])
    return ids, DrawParameters(of_rows[0], of_rows[1], of_rows[2], truncation)
