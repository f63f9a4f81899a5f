"""Small operations between the linear layers, fused for CPUs: norms, activation, rotary embedding.

float32 tensors whose last dimension is a multiple of 16 take a kernel; everything else takes plain torch
operations with the same result up to rounding. A kernel reads and writes each element once, torch's chain of
operations three to five times.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from llmkit_kernels import cpu_linear as cpu

ALIGNMENT = 16
_PARALLEL_ELEMENTS = 32768  # below this one thread is done before a second has started
_PIECE = 8192  # elements a thread takes at a time
LANES = 8  # set by load(), a constant of the compiled code
_kernels: dict[str, Any] = {}


# --- vector operations, which `cpu_linear.load` binds -------------------------------------------------------


def operation(result: Any, arguments: Sequence[Any], emit: Callable[..., Any]) -> Any:
    """A numba intrinsic of one to four arguments that `emit(builder, *values)` writes as LLVM instructions."""
    from numba.extending import intrinsic

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        value = emit(builder, *args)
        return context.get_dummy_value() if value is None else value

    def typed(_context: Any, *_values: Any) -> Any:
        return result(*arguments), codegen

    return intrinsic(with_arity(typed, 1 + len(arguments)))


def with_arity(function: Any, count: int) -> Any:
    """Give a function of `*args` a signature of `count` parameters, from which numba reads the number of arguments."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature([inspect.Parameter(f"p{i}", kind) for i in range(count)])
    return function


def emit_pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def emit_load(builder: Any, address: Any, kind: Any, align: int = 1) -> Any:
    return builder.load(emit_pointer(builder, address, kind), align=align)


def emit_store(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, emit_pointer(builder, address, value.type), align=1)


def emit_prefetch(builder: Any, address: Any) -> None:
    """Ask for the cache line at `address`; harmless for any address."""
    from llvmlite import ir

    word, pointer = ir.IntType(32), emit_pointer(builder, address, ir.IntType(8))
    constants = [ir.Constant(word, value) for value in (0, 3, 1)]  # a read, into all levels, of data
    emit_call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, *constants)


def emit_splat(builder: Any, value: Any, vector: Any) -> Any:
    from llvmlite import ir

    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), mask)


def emit_shuffle(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
    from llvmlite import ir

    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes)))


def emit_call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    from llvmlite import ir
    from numba.core import cgutils

    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def simple_operations(types: Any, vec: Any, ir: Any, vector: Any) -> dict[str, tuple[Any, Any, Any]]:
    """Name -> (result type, argument types, emitter) of the operations that are a few instructions each."""
    return {**_arithmetic(types, vec, ir, vector), **_memory(types, vec, ir, vector)}


def _arithmetic(types: Any, vec: Any, ir: Any, vector: Any) -> dict[str, tuple[Any, Any, Any]]:
    i64, f32 = types.int64, types.float32
    lanes = cpu.LANES
    suffix = f"v{lanes}f32"

    def reduce(builder: Any, value: Any, join: Callable[..., Any]) -> Any:
        count = lanes
        while count > 1:
            count //= 2
            low = emit_shuffle(builder, value, value, range(count))
            value = join(builder, low, emit_shuffle(builder, value, value, range(count, 2 * count)))
        return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

    def less(b: Any, x: Any, y: Any) -> Any:
        return b.select(b.fcmp_ordered("<", x, y), x, y)

    def greater(b: Any, x: Any, y: Any) -> Any:
        return b.select(b.fcmp_ordered(">", x, y), x, y)

    return {
        "vsplat": (vec, (f32,), lambda b, s: emit_splat(b, s, vector)),
        "vadd": (vec, (vec, vec), lambda b, x, y: b.fadd(x, y)),
        "vsub": (vec, (vec, vec), lambda b, x, y: b.fsub(x, y)),
        "vmul": (vec, (vec, vec), lambda b, x, y: b.fmul(x, y)),
        "vdiv": (vec, (vec, vec), lambda b, x, y: b.fdiv(x, y)),
        "vmax": (vec, (vec, vec), greater),
        "vfma": (vec, (vec, vec, vec), lambda b, x, y, z: emit_call(b, f"llvm.fma.{suffix}", vector, x, y, z)),
        "vexp": (vec, (vec,), _emit_exp),
        "vsum": (f32, (vec,), lambda b, v: reduce(b, v, lambda c, x, y: c.fadd(x, y))),
        "vtop": (f32, (vec,), lambda b, v: reduce(b, v, greater)),
        "vbottom": (f32, (vec,), lambda b, v: reduce(b, v, less)),
        "vmin": (vec, (vec, vec), less),
        "vround": (vec, (vec,), lambda b, x: emit_call(b, f"llvm.rint.{suffix}", vector, x)),
        "as_float": (f32, (i64,), lambda b, v: b.fptrunc(b.bitcast(v, ir.DoubleType()), ir.FloatType())),
    }


def _memory(types: Any, vec: Any, ir: Any, vector: Any) -> dict[str, tuple[Any, Any, Any]]:
    i64, f32, void = types.int64, types.float32, types.void
    lanes = cpu.LANES
    word, byte, half = (ir.VectorType(kind, lanes) for kind in (ir.IntType(32), ir.IntType(8), ir.HalfType()))
    short = ir.VectorType(ir.IntType(16), lanes)

    def nibble(b: Any, p: Any, high: bool) -> Any:
        wide = b.zext(emit_load(b, p, byte), word)
        four, mask = (ir.Constant(word, [c] * lanes) for c in (4, 15))
        return b.sitofp(b.lshr(wide, four) if high else b.and_(wide, mask), vector)

    def codes(b: Any, p: Any, low: Any, high: Any) -> None:
        upper = b.shl(b.fptosi(high, word), ir.Constant(word, [4] * lanes))
        emit_store(b, p, b.trunc(b.or_(b.fptosi(low, word), upper), byte))

    def bfloat(b: Any, p: Any) -> Any:
        wide = b.shl(b.zext(emit_load(b, p, short), word), ir.Constant(word, [16] * lanes))
        return b.bitcast(wide, vector)

    def atomic(b: Any, p: Any, index: Any) -> Any:
        return b.atomic_rmw("add", b.gep(p, [index]), ir.Constant(ir.IntType(64), 1), "monotonic")

    return {
        "vload": (vec, (i64,), lambda b, p: emit_load(b, p, vector)),
        "vstore": (void, (i64, vec), emit_store),
        "sload": (f32, (i64,), lambda b, p: emit_load(b, p, ir.FloatType())),
        "sstore": (void, (i64, f32), emit_store),
        "iload": (i64, (i64,), lambda b, p: b.sext(emit_load(b, p, ir.IntType(32)), ir.IntType(64))),
        "iload64": (i64, (i64,), lambda b, p: emit_load(b, p, ir.IntType(64))),
        "hload": (f32, (i64,), lambda b, p: b.fpext(emit_load(b, p, ir.HalfType()), ir.FloatType())),
        "vload_half": (vec, (i64,), lambda b, p: b.fpext(emit_load(b, p, half), vector)),
        "vload_bfloat": (vec, (i64,), bfloat),
        "vload_low4": (vec, (i64,), lambda b, p: nibble(b, p, False)),
        "vload_high4": (vec, (i64,), lambda b, p: nibble(b, p, True)),
        "vload_int8": (vec, (i64,), lambda b, p: b.sitofp(b.sext(emit_load(b, p, byte), word), vector)),
        "hstore": (void, (i64, f32), lambda b, p, v: emit_store(b, p, b.fptrunc(v, ir.HalfType()))),
        "vstore_codes": (void, (i64, vec, vec), codes),
        "vstore_int8": (void, (i64, vec), lambda b, p, v: emit_store(b, p, b.trunc(b.fptosi(v, word), byte))),
        "transpose": (void, (i64, i64, i64, i64), _emit_transpose),
        "take": (i64, (types.CPointer(i64), i64), atomic),
    }


def _emit_exp(builder: Any, x: Any) -> Any:
    """exp with a relative error below 2e-7; exactly 0 below -87. Cody-Waite reduction, polynomial of degree 6."""
    from llvmlite import ir

    vector = x.type
    suffix = f"v{vector.count}f32"
    word = ir.VectorType(ir.IntType(32), vector.count)

    def constant(value: float) -> Any:
        return ir.Constant(vector, [ir.Constant(ir.FloatType(), value)] * vector.count)

    def fma(a: Any, b: Any, c: Any) -> Any:
        return emit_call(builder, f"llvm.fma.{suffix}", vector, a, b, c)

    high = builder.select(builder.fcmp_ordered("<", x, constant(88.0)), x, constant(88.0))
    safe = builder.select(builder.fcmp_ordered(">", high, constant(-87.0)), high, constant(-87.0))
    power = emit_call(builder, f"llvm.rint.{suffix}", vector, builder.fmul(safe, constant(1.4426950408889634)))
    rest = fma(power, constant(-0.693145751953125), safe)
    rest = fma(power, constant(-1.428606765330187e-06), rest)
    result = constant(1 / 720)
    for factor in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        result = fma(result, rest, constant(factor))
    shift = builder.shl(builder.fptosi(power, word), ir.Constant(word, [23] * vector.count))
    scaled = builder.bitcast(builder.add(builder.bitcast(result, word), shift), vector)
    return builder.select(builder.fcmp_ordered("<", x, constant(-87.0)), constant(0.0), scaled)


def _emit_transpose(builder: Any, source: Any, source_stride: Any, target: Any, target_stride: Any) -> None:
    """LANES perfect shuffles of row pairs, log2(LANES) times, transpose a square block in registers."""
    from llvmlite import ir

    count = cpu.LANES
    vector = ir.VectorType(ir.FloatType(), count)
    rows = [emit_load(builder, address, vector) for address in emit_rows(builder, source, source_stride, count)]
    low = [lane for i in range(count // 2) for lane in (i, count + i)]
    high = [lane + count // 2 for lane in low]
    for _ in range(count.bit_length() - 1):
        pairs = [(rows[i], rows[i + count // 2]) for i in range(count // 2)]
        rows = [emit_shuffle(builder, a, b, half) for a, b in pairs for half in (low, high)]
    for row, address in zip(rows, emit_rows(builder, target, target_stride, count), strict=True):
        emit_store(builder, address, row)


def emit_rows(builder: Any, base: Any, stride: Any, count: int) -> list[Any]:
    addresses = [base]
    for _ in range(count - 1):
        addresses.append(builder.add(addresses[-1], stride))
    return addresses


# --- fused operations ---------------------------------------------------------------------------------------


def _rms_norm_kernel(args: Any) -> None:
    """args: x, residual (0: none), weight, out, sum out, rows, dimension, rows a piece, eps."""
    x, residual, weight, out, total, rows, dim, piece = (
        args[1], args[2], args[3], args[4], args[5], args[6], args[7], args[8],
    )  # fmt: skip
    eps = cpu.as_float(args[9])
    while True:
        start = cpu.take(args, 0) * piece
        if start >= rows:
            break
        for row in range(start, min(start + piece, rows)):
            first = 4 * row * dim
            source = x + first
            squares = cpu.vsplat(0.0)
            if residual != 0:
                source = total + first
                for j in range(0, 4 * dim, 4 * LANES):
                    value = cpu.vadd(cpu.vload(x + first + j), cpu.vload(residual + first + j))
                    cpu.vstore(source + j, value)
                    squares = cpu.vfma(value, value, squares)
            else:
                for j in range(0, 4 * dim, 4 * LANES):
                    value = cpu.vload(source + j)
                    squares = cpu.vfma(value, value, squares)
            factor = cpu.vsplat(1 / (cpu.vsum(squares) / dim + eps) ** 0.5)
            for j in range(0, 4 * dim, 4 * LANES):
                value = cpu.vmul(cpu.vload(source + j), factor)
                cpu.vstore(out + first + j, cpu.vmul(value, cpu.vload(weight + j)))


def _silu_and_mul_kernel(args: Any) -> None:
    """args: gate_up, out, rows, dimension of out, rows a piece."""
    x, out, rows, dim, piece = args[1], args[2], args[3], args[4], args[5]
    zero, one = cpu.vsplat(0.0), cpu.vsplat(1.0)
    while True:
        start = cpu.take(args, 0) * piece
        if start >= rows:
            break
        for row in range(start, min(start + piece, rows)):
            source = x + 8 * row * dim
            for j in range(0, 4 * dim, 4 * LANES):
                gate = cpu.vload(source + j)
                power = cpu.vexp(cpu.vsub(zero, gate))
                value = cpu.vdiv(cpu.vmul(gate, cpu.vload(source + 4 * dim + j)), cpu.vadd(one, power))
                cpu.vstore(out + 4 * row * dim + j, value)


def _rotary_kernel(args: Any) -> None:
    """args: positions, q, k, cache, tokens, q heads, k heads, head size, tokens a piece."""
    positions, q, k, cache, tokens, q_heads, k_heads, size, piece = (
        args[1], args[2], args[3], args[4], args[5], args[6], args[7], args[8], args[9],
    )  # fmt: skip
    half = 2 * size  # bytes of half a head
    while True:
        start = cpu.take(args, 0) * piece
        if start >= tokens:
            break
        for t in range(start, min(start + piece, tokens)):
            cosine = cache + 4 * size * cpu.iload64(positions + 8 * t)
            for h in range(q_heads + k_heads):
                base = q + 4 * size * (t * q_heads + h)
                if h >= q_heads:
                    base = k + 4 * size * (t * k_heads + h - q_heads)
                whole = half // (4 * LANES) * (4 * LANES)
                for j in range(0, whole, 4 * LANES):
                    cos, sin = cpu.vload(cosine + j), cpu.vload(cosine + half + j)
                    a, b = cpu.vload(base + j), cpu.vload(base + half + j)
                    cpu.vstore(base + j, cpu.vsub(cpu.vmul(a, cos), cpu.vmul(b, sin)))
                    cpu.vstore(base + half + j, cpu.vfma(b, cos, cpu.vmul(a, sin)))
                for j in range(whole, half, 4):
                    c, s = cpu.sload(cosine + j), cpu.sload(cosine + half + j)
                    d, e = cpu.sload(base + j), cpu.sload(base + half + j)
                    cpu.sstore(base + j, d * c - e * s)
                    cpu.sstore(base + half + j, e * c + d * s)


def load() -> dict[str, Any]:
    """Compile or load the kernels of this module."""
    global LANES
    if not _kernels:
        cpu.load()
        LANES = cpu.LANES
        functions: tuple[Callable[..., None], ...] = (_rms_norm_kernel, _silu_and_mul_kernel, _rotary_kernel)
        _kernels.update({function.__name__: cpu.compile_kernel(function) for function in functions})
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
    out = torch.empty_like(x)
    rows = x.numel() // dim
    threads, piece = _share(rows, dim)
    kernel = (_kernels or load())["_rms_norm_kernel"]
    bits = cpu.float_bits(eps)
    cpu.launch(kernel, threads, x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), 0, rows, dim, piece, bits)
    return out


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), both new tensors; x and residual [..., dim], weight [dim]."""
    if not (_fits(x) and _fits(residual) and weight.dtype is torch.float32):
        total = x + residual
        return torch.nn.functional.rms_norm(total, (total.shape[-1],), weight, eps), total
    dim = x.shape[-1]
    out, total = torch.empty_like(x), torch.empty_like(x)
    rows = x.numel() // dim
    threads, piece = _share(rows, dim)
    cpu.launch(
        (_kernels or load())["_rms_norm_kernel"], threads, x.data_ptr(), residual.data_ptr(), weight.data_ptr(),
        out.data_ptr(), total.data_ptr(), rows, dim, piece, cpu.float_bits(eps),
    )  # fmt: skip
    return out, total


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up [..., 2 dim] = (gate, up) -> [..., dim]."""
    dim = gate_up.shape[-1] // 2
    if not _fits(gate_up) or dim % ALIGNMENT:
        return torch.nn.functional.silu(gate_up[..., :dim]) * gate_up[..., dim:]
    out = gate_up.new_empty((*gate_up.shape[:-1], dim))
    rows = out.numel() // dim
    threads, piece = _share(rows, dim)
    kernel = (_kernels or load())["_silu_and_mul_kernel"]
    cpu.launch(kernel, threads, gate_up.data_ptr(), out.data_ptr(), rows, dim, piece)
    return out


def rotary(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin_cache: torch.Tensor, head_size: int
) -> None:
    """Rotate q and k in place (neox style: the two halves of a head are the pairs).

    positions: int64 [tokens]; q: [tokens, q heads * head_size]; k: [tokens, k heads * head_size];
    cos_sin_cache: [max positions, head_size], row p holds the cosines of p in its first half, then the sines.
    q and k may be strided; only contiguous float32 ones take the kernel.
    """
    tokens = positions.shape[0]
    contiguous = q.is_contiguous() and k.is_contiguous() and cos_sin_cache.is_contiguous() and positions.is_contiguous()
    if contiguous and q.dtype is torch.float32 and k.dtype is torch.float32 and cos_sin_cache.dtype is torch.float32:
        threads, piece = _share(tokens, q.shape[1] + k.shape[1])
        cpu.launch(
            (_kernels or load())["_rotary_kernel"], threads, positions.data_ptr(), q.data_ptr(), k.data_ptr(),
            cos_sin_cache.data_ptr(), tokens, q.shape[1] // head_size, k.shape[1] // head_size, head_size, piece,
        )  # fmt: skip
        return
    cosine, sine = cos_sin_cache[positions].unsqueeze(1).chunk(2, -1)
    for x in (q, k):
        heads = x.unflatten(-1, (-1, head_size))
        first, second = heads.float().chunk(2, -1)
        heads.copy_(torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1))
