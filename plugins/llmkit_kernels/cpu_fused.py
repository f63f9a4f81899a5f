"""Small operations between the linear layers, fused for CPUs: norms, activation, rotary embedding.

float32 tensors whose last dimension is a multiple of 16 take a kernel; everything else takes plain torch
operations with the same result up to rounding. A kernel reads and writes each element once, torch's chain of
operations three to five times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llmkit.jit import runtime
from llmkit.jit import vector as ops

ALIGNMENT = 16
_PARALLEL_ELEMENTS = 32768  # below this one thread is done before a second has started
_PIECE = 8192  # elements a thread takes at a time
LANES = 8  # set by load(), a constant of the compiled code
_kernels: dict[str, Any] = {}


def _rms_norm_kernel(args: Any) -> None:
    """args: x, residual (0: none), weight, out, sum out, rows, dimension, rows a piece, eps."""
    x, residual, weight, out, total, rows, dim, piece = (
        args[1], args[2], args[3], args[4], args[5], args[6], args[7], args[8],
    )  # fmt: skip
    eps = ops.as_float(args[9])
    while True:
        start = ops.take(args, 0) * piece
        if start >= rows:
            break
        for row in range(start, min(start + piece, rows)):
            first = 4 * row * dim
            source = x + first
            squares = ops.vsplat(0.0)
            if residual != 0:
                source = total + first
                for j in range(0, 4 * dim, 4 * LANES):
                    value = ops.vadd(ops.vload(x + first + j), ops.vload(residual + first + j))
                    ops.vstore(source + j, value)
                    squares = ops.vfma(value, value, squares)
            else:
                for j in range(0, 4 * dim, 4 * LANES):
                    value = ops.vload(source + j)
                    squares = ops.vfma(value, value, squares)
            factor = ops.vsplat(1 / (ops.vsum(squares) / dim + eps) ** 0.5)
            for j in range(0, 4 * dim, 4 * LANES):
                value = ops.vmul(ops.vload(source + j), factor)
                ops.vstore(out + first + j, ops.vmul(value, ops.vload(weight + j)))


def _silu_and_mul_kernel(args: Any) -> None:
    """args: gate_up, out, rows, dimension of out, rows a piece."""
    x, out, rows, dim, piece = args[1], args[2], args[3], args[4], args[5]
    zero, one = ops.vsplat(0.0), ops.vsplat(1.0)
    while True:
        start = ops.take(args, 0) * piece
        if start >= rows:
            break
        for row in range(start, min(start + piece, rows)):
            source = x + 8 * row * dim
            for j in range(0, 4 * dim, 4 * LANES):
                gate = ops.vload(source + j)
                power = ops.vexp(ops.vsub(zero, gate))
                value = ops.vdiv(ops.vmul(gate, ops.vload(source + 4 * dim + j)), ops.vadd(one, power))
                ops.vstore(out + 4 * row * dim + j, value)


def _rotary_kernel(args: Any) -> None:
    """args: positions, q, k, cache, tokens, q heads, k heads, head size, tokens a piece, elements a row of q, of k."""
    positions, q, k, cache, tokens, q_heads, k_heads, size, piece, q_row, k_row = (
        args[1], args[2], args[3], args[4], args[5], args[6], args[7], args[8], args[9], args[10], args[11],
    )  # fmt: skip
    half = 2 * size  # bytes of half a head
    while True:
        start = ops.take(args, 0) * piece
        if start >= tokens:
            break
        for t in range(start, min(start + piece, tokens)):
            cosine = cache + 4 * size * ops.iload64(positions + 8 * t)
            for h in range(q_heads + k_heads):
                base = q + 4 * (t * q_row + size * h)
                if h >= q_heads:
                    base = k + 4 * (t * k_row + size * (h - q_heads))
                whole = half // (4 * LANES) * (4 * LANES)
                for j in range(0, whole, 4 * LANES):
                    cos, sin = ops.vload(cosine + j), ops.vload(cosine + half + j)
                    a, b = ops.vload(base + j), ops.vload(base + half + j)
                    ops.vstore(base + j, ops.vsub(ops.vmul(a, cos), ops.vmul(b, sin)))
                    ops.vstore(base + half + j, ops.vfma(b, cos, ops.vmul(a, sin)))
                for j in range(whole, half, 4):
                    c, s = ops.sload(cosine + j), ops.sload(cosine + half + j)
                    d, e = ops.sload(base + j), ops.sload(base + half + j)
                    ops.sstore(base + j, d * c - e * s)
                    ops.sstore(base + half + j, e * c + d * s)


def load() -> dict[str, Any]:
    """Compile or load the kernels of this module."""
    global LANES
    if not _kernels:
        runtime.load()
        LANES = ops.LANES
        functions: tuple[Callable[..., None], ...] = (_rms_norm_kernel, _silu_and_mul_kernel, _rotary_kernel)
        _kernels.update({function.__name__: runtime.compile_kernel(function) for function in functions})
    return _kernels


def _share(rows: int, dim: int) -> tuple[int, int]:
    """(threads, rows a piece) for `rows` rows of `dim` elements."""
    threads = torch.get_num_threads() if rows * dim >= _PARALLEL_ELEMENTS else 1
    return threads, max(1, _PIECE // dim) if threads > 1 else rows


def _fits(x: torch.Tensor) -> bool:
    return x.dtype is torch.float32 and x.shape[-1] % ALIGNMENT == 0 and x.is_contiguous()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; x [..., dim], weight [dim]."""
    dim = x.shape[-1]
    if not (_fits(x) and weight.dtype is torch.float32):
        return torch.nn.functional.rms_norm(x, (dim,), weight, eps)
    out = runtime.empty(tuple(x.shape))
    rows = x.numel() // dim
    threads, piece = _share(rows, dim)
    kernel = (_kernels or load())["_rms_norm_kernel"]
    bits = runtime.float_bits(eps)
    runtime.launch(kernel, threads, x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), 0, rows, dim, piece, bits)
    return out


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), both new tensors; x and residual [..., dim], weight [dim]."""
    if not (_fits(x) and _fits(residual) and weight.dtype is torch.float32):
        total = x + residual
        return torch.nn.functional.rms_norm(total, (total.shape[-1],), weight, eps), total
    dim = x.shape[-1]
    out, total = runtime.empty(tuple(x.shape)), runtime.empty(tuple(x.shape))
    rows = x.numel() // dim
    threads, piece = _share(rows, dim)
    runtime.launch(
        (_kernels or load())["_rms_norm_kernel"], threads, x.data_ptr(), residual.data_ptr(), weight.data_ptr(),
        out.data_ptr(), total.data_ptr(), rows, dim, piece, runtime.float_bits(eps),
    )  # fmt: skip
    return out, total


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up [..., 2 dim] = (gate, up) -> [..., dim]."""
    dim = gate_up.shape[-1] // 2
    if not _fits(gate_up) or dim % ALIGNMENT:
        return torch.nn.functional.silu(gate_up[..., :dim]) * gate_up[..., dim:]
    out = runtime.empty((*gate_up.shape[:-1], dim))
    rows = out.numel() // dim
    threads, piece = _share(rows, dim)
    kernel = (_kernels or load())["_silu_and_mul_kernel"]
    runtime.launch(kernel, threads, gate_up.data_ptr(), out.data_ptr(), rows, dim, piece)
    return out


def rotary(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin_cache: torch.Tensor, head_size: int
) -> None:
    """Rotate q and k in place (neox style: the two halves of a head are the pairs).

    positions: int64 [tokens]; q: [tokens, q heads * head_size]; k: [tokens, k heads * head_size];
    cos_sin_cache: [max positions, head_size], row p holds the cosines of p in its first half, then the sines.
    Rows of q and k may be any distance apart, as slices of a wider tensor are; float32 ones take the kernel.
    """
    tokens = positions.shape[0]
    dense = q.stride(1) == k.stride(1) == 1 and cos_sin_cache.is_contiguous() and positions.is_contiguous()
    if dense and q.dtype is torch.float32 and k.dtype is torch.float32 and cos_sin_cache.dtype is torch.float32:
        threads, piece = _share(tokens, q.shape[1] + k.shape[1])
        runtime.launch(
            (_kernels or load())["_rotary_kernel"], threads, positions.data_ptr(), q.data_ptr(), k.data_ptr(),
            cos_sin_cache.data_ptr(), tokens, q.shape[1] // head_size, k.shape[1] // head_size, head_size, piece,
            q.stride(0), k.stride(0),
        )  # fmt: skip
        return
    cosine, sine = cos_sin_cache[positions].unsqueeze(1).chunk(2, -1)
    for x in (q, k):
        heads = x.unflatten(-1, (-1, head_size))
        first, second = heads.float().chunk(2, -1)
        heads.copy_(torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1))
