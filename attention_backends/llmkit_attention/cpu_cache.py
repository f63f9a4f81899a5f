"""Writing keys and values to their slots of a paged cache on CPUs."""

from __future__ import annotations

from typing import Any

import torch

from llmkit.jit import runtime
from llmkit.jit import vector as ops

HEAD_ALIGNMENT = 16
LANES = 8  # set by load(), a constant of the compiled code
_kernels: dict[str, Any] = {}


def _write_kernel(args: Any) -> None:
    """Copy rows of k and v to their slots; args: k, v, kv, slots, tokens, heads, d, page shift, tokens a piece,
    elements a row of k, of v."""
    k, v, kv, slots, tokens, heads, d, shift, piece, k_row, v_row = (
        args[1], args[2], args[3], args[4], args[5], args[6], args[7], args[8], args[9], args[10], args[11],
    )  # fmt: skip
    while True:
        start = ops.take(args, 0) * piece
        if start >= tokens:
            break
        for h in range(heads):  # a head's part of a page is written in one go: one jump a page, not one a token
            for t in range(start, min(start + piece, tokens)):
                slot = ops.iload64(slots + 8 * t)
                if slot < 0:
                    continue
                page, offset = slot >> shift, slot & ((1 << shift) - 1)
                key, value = k + 4 * (t * k_row + h * d), v + 4 * (t * v_row + h * d)
                target = kv + 4 * ((((page * 2) * heads + h) << shift) + offset) * d
                values = target + 4 * ((heads << shift) * d)
                for c in range(0, d, LANES):
                    ops.vstore(target + 4 * c, ops.vload(key + 4 * c))
                    ops.vstore(values + 4 * c, ops.vload(value + 4 * c))


def load() -> None:
    """Compile or load the kernel."""
    global LANES
    if not _kernels:
        runtime.load()
        LANES = ops.LANES
        _kernels["write"] = runtime.compile_kernel(_write_kernel)


def dense_rows(x: torch.Tensor) -> bool:
    """Whether every row [heads, head size] of x [tokens, heads, head size] is contiguous."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


def write_kv(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write k and v [tokens, KV heads, head size] to their slots of kv [pages, 2, KV heads, page size, head size].

    slot_mapping: int64 [tokens], page * page size + offset; a negative slot is skipped. A float32 cache takes
    the kernel, other dtypes an indexed assignment of torch.
    """
    _, _, heads, page_size, d = kv.shape
    if kv.dtype is torch.float32 and k.dtype is torch.float32 and d % HEAD_ALIGNMENT == 0 and kv.is_contiguous():
        load()
        if not page_size & (page_size - 1):
            k, v = (x if dense_rows(x) else x.contiguous() for x in (k, v))
            tokens = k.shape[0]
            runtime.launch(
                _kernels["write"], torch.get_num_threads() if tokens >= 128 else 1,
                k.data_ptr(), v.data_ptr(), kv.data_ptr(), slot_mapping.data_ptr(), tokens, heads, d,
                page_size.bit_length() - 1, 32, k.stride(0), v.stride(0),
            )  # fmt: skip
            return
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    pages, offsets = slots // page_size, slots % page_size
    kv[pages, 0, :, offsets] = k[kept].to(kv.dtype)
    kv[pages, 1, :, offsets] = v[kept].to(kv.dtype)
