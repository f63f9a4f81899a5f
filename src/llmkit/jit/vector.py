"""Vector operations that kernels call, and the emitters of LLVM instructions behind them.

Addresses are int64 bytes. The operations are numba intrinsics; `bind`, which `runtime.load` calls, makes them for the
instruction set of this processor. Until then the names hold None.
"""

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable, Sequence
from typing import Any

LANES = 8  # float32 in a vector; `bind` makes it 16 with AVX-512

# Vector operations, bound by `bind`. `vec` is a vector of LANES float32.
vload: Any = None  # (address) -> vec
vstore: Any = None  # (address, vec)
vsplat: Any = None  # (float32) -> vec
vadd: Any = None
vsub: Any = None
vmul: Any = None
vdiv: Any = None
vmax: Any = None
vfma: Any = None  # (a, b, c) -> a * b + c
vexp: Any = None
vsum: Any = None  # (vec) -> float32
vtop: Any = None  # (vec) -> float32, the greatest lane
vbottom: Any = None  # (vec) -> float32, the least lane
sload: Any = None  # (address) -> float32
sstore: Any = None  # (address, float32)
iload: Any = None  # (address) -> int64, from int32
hload: Any = None  # (address) -> float32, from float16
vload_half: Any = None  # (address) -> vec, from float16
vload_bfloat: Any = None  # (address) -> vec, from bfloat16
vmin: Any = None
vround: Any = None  # to the nearest integer, ties to even
hstore: Any = None  # (address, float32), as float16
vstore_int8: Any = None  # (address, vec), from integers -128..127
vstore_int16: Any = None  # (address, vec), from integers -32768..32767
prefetch: Any = None  # (address), into the second cache
transpose: Any = None  # (source, source_stride, target, target_stride): a LANES x LANES block; strides in bytes
iload64: Any = None  # (address) -> int64
istore: Any = None  # (address, int64), its low half as int32
take: Any = None  # (args, index) -> int64, adds one to args[index] and gives the old value
as_float: Any = None  # (int64) -> float32, from the bits of a float64


def bind() -> None:
    """Fix LANES by the processor and make the operations. Imports numba."""
    global LANES
    import llvmlite.binding as llvm
    from llvmlite import ir
    from numba.core import config, types
    from numba.core.datamodel import models, register_default

    features = config.CPU_FEATURES if config.CPU_FEATURES is not None else llvm.get_host_cpu_features().flatten()
    if "+avx512f" in features and "+avx512bw" in features:
        LANES = 16
    vector = ir.VectorType(ir.FloatType(), LANES)

    class FloatVector(types.Type):
        def __init__(self) -> None:
            super().__init__(name=f"float32x{LANES}")

    @register_default(FloatVector)
    class FloatVectorModel(models.PrimitiveModel):  # type: ignore[misc]
        def __init__(self, manager: Any, fe_type: Any) -> None:
            super().__init__(manager, fe_type, vector)

    vec = FloatVector()
    operations = {**_arithmetic(types, vec, ir, vector), **_memory(types, vec, ir, vector)}
    for name, (result, arguments, emit) in operations.items():
        globals()[name] = operation(result, arguments, emit)


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
    """Ask for the cache line at `address` in the second cache; harmless for any address."""
    from llvmlite import ir

    word, pointer = ir.IntType(32), emit_pointer(builder, address, ir.IntType(8))
    constants = [ir.Constant(word, value) for value in (0, 2, 1)]  # a read, into the second cache, of data
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


def emit_dot_pairs(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    """sums[i] + a[2 i] b[2 i] + a[2 i + 1] b[2 i + 1] for int32 sums [LANES] and int16 a, b [2 * LANES]."""
    from llvmlite import ir

    words = sums.type
    if platform.machine().lower() in ("x86_64", "amd64"):
        # With VNNI LLVM makes one instruction of the two (`runtime.load` sees to it).
        name = "llvm.x86.avx512.pmaddw.d.512" if LANES == 16 else "llvm.x86.avx2.pmadd.wd"
        return builder.add(sums, emit_call(builder, name, words, a, b))
    wide = ir.VectorType(ir.IntType(32), 2 * LANES)
    product = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    even, odd = (emit_shuffle(builder, product, product, range(i, 2 * LANES, 2)) for i in (0, 1))
    return builder.add(sums, builder.add(even, odd))


def emit_rows(builder: Any, base: Any, stride: Any, count: int) -> list[Any]:
    addresses = [base]
    for _ in range(count - 1):
        addresses.append(builder.add(addresses[-1], stride))
    return addresses


def emit_loop(
    builder: Any, start: Any, stop: Any, step: int, carried: list[Any], body: Callable[..., list[Any]]
) -> list[Any]:
    """A counted loop over i64 with `carried` values in registers; `body(index, values)` gives the next values."""
    from llvmlite import ir

    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("tile.head", "tile.body", "tile.after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(ir.IntType(64))
    index.add_incoming(start, before)
    values = [builder.phi(value.type) for value in carried]
    for phi, value in zip(values, carried, strict=True):
        phi.add_incoming(value, before)
    builder.cbranch(builder.icmp_signed("<", index, stop), inside, after)
    builder.position_at_end(inside)
    following = body(index, values)
    index.add_incoming(builder.add(index, ir.Constant(ir.IntType(64), step)), builder.block)
    for phi, value in zip(values, following, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values


def _arithmetic(types: Any, vec: Any, ir: Any, vector: Any) -> dict[str, tuple[Any, Any, Any]]:
    i64, f32 = types.int64, types.float32
    lanes = LANES
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
    lanes = LANES
    word, byte, half = (ir.VectorType(kind, lanes) for kind in (ir.IntType(32), ir.IntType(8), ir.HalfType()))
    short = ir.VectorType(ir.IntType(16), lanes)

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
        "istore": (void, (i64, i64), lambda b, p, v: emit_store(b, p, b.trunc(v, ir.IntType(32)))),
        "hload": (f32, (i64,), lambda b, p: b.fpext(emit_load(b, p, ir.HalfType()), ir.FloatType())),
        "vload_half": (vec, (i64,), lambda b, p: b.fpext(emit_load(b, p, half), vector)),
        "vload_bfloat": (vec, (i64,), bfloat),
        "hstore": (void, (i64, f32), lambda b, p, v: emit_store(b, p, b.fptrunc(v, ir.HalfType()))),
        "vstore_int8": (void, (i64, vec), lambda b, p, v: emit_store(b, p, b.trunc(b.fptosi(v, word), byte))),
        "vstore_int16": (void, (i64, vec), lambda b, p, v: emit_store(b, p, b.trunc(b.fptosi(v, word), short))),
        "prefetch": (void, (i64,), emit_prefetch),
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

    count = LANES
    vector = ir.VectorType(ir.FloatType(), count)
    rows = [emit_load(builder, address, vector) for address in emit_rows(builder, source, source_stride, count)]
    low = [lane for i in range(count // 2) for lane in (i, count + i)]
    high = [lane + count // 2 for lane in low]
    for _ in range(count.bit_length() - 1):
        pairs = [(rows[i], rows[i + count // 2]) for i in range(count // 2)]
        rows = [emit_shuffle(builder, a, b, half) for a, b in pairs for half in (low, high)]
    for row, address in zip(rows, emit_rows(builder, target, target_stride, count), strict=True):
        emit_store(builder, address, row)
