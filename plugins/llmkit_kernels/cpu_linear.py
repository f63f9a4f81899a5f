"""Float32 linear layers for CPUs, and the small run time that the other CPU kernels share.

Kernels are numba C callbacks `void kernel(int64 *args)` written with explicit vector operations. They run on
*torch's own* OpenMP threads: `launch` hands the function pointer to the `GOMP_parallel` of the libgomp that
torch has loaded, so that there is one pool, one number of threads (`torch.get_num_threads()`) and no two sets
of spinning threads on the same cores. Inside, threads take pieces of work from an atomic counter, `args[0]`;
every output is made by one thread in a fixed order, so results do not depend on the schedule.

numba is imported by the first call (or by `load`), never by the import of this module.

Sources: register tiling after Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication"
(2008).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

# Lanes of a vector and sizes of register tiles; `load` fixes them by the instruction set (16 lanes with AVX-512).
LANES = 8
TILE_ROWS = 3  # rows of x in `dot_tile`: 3x4 accumulators fill AVX2's 16 registers, 6x4 the 32 of AVX-512
OUTER_ROWS = 6  # rows in `outer_tile`
OUTER_VECTORS = 2  # vectors a row in `outer_tile`
HAS_AVX2 = False

STREAMS = 4  # runs of rows that one thread reads at once when x is a single row
PIECE = 16  # rows of a run taken at a time
PANEL = 16  # rows of the weight that stay in the cache while tiles of x pass over them
MAX_SMALL_ROWS = 64  # above this the matrix product of oneDNN is faster than tiles on the unpacked weight

# Vector operations, bound by `load`. Addresses are int64 bytes; `vec` is a vector of LANES float32.
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
vload_low4: Any = None  # (address) -> vec, low nibbles of LANES bytes
vload_high4: Any = None  # (address) -> vec, high nibbles of LANES bytes
vload_int8: Any = None  # (address) -> vec, from int8
vmin: Any = None
vround: Any = None  # to the nearest integer, ties to even
hstore: Any = None  # (address, float32), as float16
vstore_codes: Any = None  # (address, low, high): integers 0..15 of two vectors to the nibbles of LANES bytes
vstore_int8: Any = None  # (address, vec), from integers -128..127
transpose: Any = None  # (source, source_stride, target, target_stride): a LANES x LANES block; strides in bytes
iload64: Any = None  # (address) -> int64
take: Any = None  # (args, index) -> int64, adds one to args[index] and gives the old value
as_float: Any = None  # (int64) -> float32, from the bits of a float64
dot_tile: Any = None  # (MR, NR, a, lda, b, ldb, c, ldc, k, ahead): c[i, j] = sum a[i, :] b[j, :]
outer_tile: Any = None  # (MR, NV, a, lda, b, ldb, c, ldc, k, add, ahead): c[i, :] (+)= sum a[i, j] b[j, :]

_KERNEL_OPTIONS = {"cache": True, "error_model": "numpy", "fastmath": False}
_SOURCES = (Path(__file__), Path(__file__).with_name("cpu_fused.py"))
_lock = threading.Lock()
_parallel: Callable[..., None] | None = None
_loaded = False
_cache_folder: Path | None = None


# --- run time -----------------------------------------------------------------------------------------------


def configure_cache(path: str | os.PathLike[str]) -> None:
    """Keep compiled kernels under `path` instead of `NUMBA_CACHE_DIR` or the user's cache folder. Call it first."""
    global _cache_folder
    _cache_folder = Path(path)


def _prepare_cache() -> None:
    # The operations here are inlined in every module's kernels, and numba only watches the file of the kernel itself:
    # a folder named by the content of the files that define them keeps stale code out.
    import numba

    base = _cache_folder or Path(os.environ.get("NUMBA_CACHE_DIR") or Path.home() / ".cache" / "llmkit" / "numba")
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()[:12]
    numba.config.CACHE_DIR = str(base / digest)


def load() -> None:
    """Import numba and bind the vector operations. Safe to call again and from several threads."""
    global _loaded
    if _loaded:
        return
    with _lock:
        if not _loaded:
            _prepare_cache()
            _bind_operations()
            _bind_threads()
            _loaded = True


def compile_kernel(function: Callable[..., None]) -> Any:
    """Compile (or load from the cache) `function(args: int64*)`; its machine address is `.address`."""
    load()
    import numba

    return numba.cfunc(numba.types.void(numba.types.CPointer(numba.types.int64)), **_KERNEL_OPTIONS)(function)


def _bind_threads() -> None:
    """Find GOMP_parallel in the OpenMP library that torch uses; without one kernels run on the calling thread."""
    global _parallel
    folder = Path(torch.__file__).parent / "lib"
    for path in sorted(folder.glob("libgomp*.so*")):
        try:
            symbol = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        symbol.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        symbol.restype = None
        _parallel = symbol
        return


_buffers = threading.local()


def scratch_address(size: int) -> int:
    """The address of `size` bytes that belong to the calling Python thread until its next call."""
    buffer = getattr(_buffers, "buffer", None)
    if buffer is None or buffer.numel() < size:
        buffer = _buffers.buffer = torch.empty(size, dtype=torch.uint8)
    return int(buffer.data_ptr())


def launch(kernel: Any, threads: int, *values: int) -> None:
    """Run `kernel` on `threads` threads with args = [0, *values]; returns when all have finished."""
    args = (ctypes.c_int64 * (len(values) + 1))(0, *values)
    if threads > 1 and _parallel is not None:
        _parallel(kernel.address, args, threads, 0)
    else:
        kernel.ctypes(ctypes.cast(args, ctypes.POINTER(ctypes.c_int64)))


@lru_cache(maxsize=256)
def float_bits(value: float) -> int:
    """The bits of a float64 as an integer, as kernels take floats (`as_float`)."""
    return int(struct.unpack("q", struct.pack("d", value))[0])


# --- operations and register tiles --------------------------------------------------------------------------


def _bind_operations() -> None:
    global LANES, TILE_ROWS, OUTER_VECTORS, HAS_AVX2
    import llvmlite.binding as llvm
    from numba.core import config, types
    from numba.core.datamodel import models, register_default

    from llmkit_kernels import cpu_fused as ops

    features = config.CPU_FEATURES if config.CPU_FEATURES is not None else llvm.get_host_cpu_features().flatten()
    HAS_AVX2 = "+avx2" in features
    if "+avx512f" in features and "+avx512bw" in features:
        LANES, TILE_ROWS, OUTER_VECTORS = 16, 6, 4

    from llvmlite import ir

    vector = ir.VectorType(ir.FloatType(), LANES)

    class FloatVector(types.Type):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name=f"float32x{LANES}")

    @register_default(FloatVector)
    class FloatVectorModel(models.PrimitiveModel):  # type: ignore[misc]
        def __init__(self, manager: Any, fe_type: Any) -> None:
            super().__init__(manager, fe_type, vector)

    vec = FloatVector()
    signatures = ops.simple_operations(types, vec, ir, vector)
    for name, (result, arguments, emit) in signatures.items():
        globals()[name] = ops.operation(result, arguments, emit)
    globals()["dot_tile"] = tile_operation(8, _emit_dot_tile)
    globals()["outer_tile"] = tile_operation(9, _emit_outer_tile)


def tile_operation(values: int, emit: Callable[..., None]) -> Any:
    """An intrinsic whose first two arguments are literal tile sizes, followed by `values` int64."""
    from numba.core import types
    from numba.extending import intrinsic

    from llmkit_kernels import cpu_fused as ops

    def typed(_context: Any, rows: Any, columns: Any, *_values: Any) -> Any:
        if not (isinstance(rows, types.IntegerLiteral) and isinstance(columns, types.IntegerLiteral)):
            return None

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            emit(builder, rows.literal_value, columns.literal_value, *args[2:])
            return context.get_dummy_value()

        return types.void(rows, columns, *[types.int64] * values), codegen

    return intrinsic(prefer_literal=True)(ops.with_arity(typed, 3 + values))


def loop(
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


def _emit_dot_tile(
    builder: Any, mr: int, nr: int, a: Any, lda: Any, b: Any, ldb: Any, c: Any, ldc: Any, k: Any, ahead: Any
) -> None:
    """c[i, j] = sum over k of a[i, k] b[j, k] for an mr x nr tile; strides in bytes, nr 1 or 4, k any number.

    With nr = 4 the 4 rows (2 when mr > 3) at `ahead`, as long and as far apart as those of b, are prefetched
    meanwhile.
    """
    from llvmlite import ir

    from llmkit_kernels import cpu_fused as ops

    vector, single, i64 = ir.VectorType(ir.FloatType(), LANES), ir.FloatType(), ir.IntType(64)
    a_rows, b_rows = ops.emit_rows(builder, a, lda, mr), ops.emit_rows(builder, b, ldb, nr)
    ahead_rows = ops.emit_rows(builder, ahead, ldb, 2 if mr > 3 else 4) if nr == 4 else []
    kinds: dict[Any, str] = {vector: f"llvm.fma.v{LANES}f32", single: "llvm.fma.f32"}

    def body(kind: Any) -> Callable[..., list[Any]]:
        def step(index: Any, values: list[Any]) -> list[Any]:
            # A step of 8 lanes is half a cache line: there one instruction walks over two rows.
            for row in ahead_rows[:: 16 // LANES] if kind is vector else []:
                offset = index if LANES == 16 else builder.shl(index, ir.Constant(i64, 1))
                ops.emit_prefetch(builder, builder.add(row, offset))
            lefts = [ops.emit_load(builder, builder.add(row, index), kind) for row in a_rows]
            result = list(values)
            for j, row in enumerate(b_rows):
                place = builder.add(row, index)
                right = ops.emit_load(builder, place, kind)
                for i, left in enumerate(lefts):
                    result[i * nr + j] = ops.emit_call(builder, kinds[kind], kind, left, right, values[i * nr + j])
            return result

        return step

    total = builder.shl(k, ir.Constant(i64, 2))
    main = builder.and_(total, ir.Constant(i64, -4 * LANES))
    zero = ir.Constant(i64, 0)
    sums = loop(builder, zero, main, 4 * LANES, [ir.Constant(vector, [0.0] * LANES)] * (mr * nr), body(vector))
    sums = [_fold(builder, sums[i * nr : (i + 1) * nr]) for i in range(mr)]  # type: ignore[misc]
    parts = [builder.extract_element(row, ir.Constant(ir.IntType(32), j)) for row in sums for j in range(nr)]
    parts = loop(builder, main, total, 4, parts, body(single))
    for i, row in enumerate(ops.emit_rows(builder, c, ldc, mr)):
        for j in range(nr):
            target = builder.add(row, ir.Constant(i64, 4 * j))
            ops.emit_store(builder, target, parts[i * nr + j])


def _fold(builder: Any, values: list[Any]) -> Any:
    """The sums of the lanes of one or four vectors, as lanes of a vector of four."""
    from llmkit_kernels import cpu_fused as ops

    rows = list(values)
    count = LANES
    while count > 4:
        count //= 2
        low, high = range(count), range(count, 2 * count)
        rows = [
            builder.fadd(ops.emit_shuffle(builder, v, v, low), ops.emit_shuffle(builder, v, v, high)) for v in rows
        ]
    rows = rows * 4 if len(rows) == 1 else rows
    pairs = [
        builder.fadd(ops.emit_shuffle(builder, x, y, (0, 1, 4, 5)), ops.emit_shuffle(builder, x, y, (2, 3, 6, 7)))
        for x, y in (rows[:2], rows[2:])
    ]
    even, odd = (ops.emit_shuffle(builder, *pairs, lanes) for lanes in ((0, 2, 4, 6), (1, 3, 5, 7)))
    return builder.fadd(even, odd)


def _emit_outer_tile(
    builder: Any, mr: int, nv: int, a: Any, lda: Any, b: Any, ldb: Any, c: Any, ldc: Any, k: Any, add: Any, ahead: Any
) -> None:
    """c[i, :] = (add ? c[i, :] : 0) + sum over j < k of a[i, j] b[j, :] for mr rows of nv vectors; strides in bytes.

    With mr < OUTER_ROWS the memory `ahead` bytes after each piece of b is prefetched.
    """
    from llvmlite import ir

    from llmkit_kernels import cpu_fused as ops

    vector, i64 = ir.VectorType(ir.FloatType(), LANES), ir.IntType(64)
    a_rows, c_rows = ops.emit_rows(builder, a, lda, mr), ops.emit_rows(builder, c, ldc, mr)
    targets = [builder.add(row, ir.Constant(i64, 4 * LANES * j)) for row in c_rows for j in range(nv)]
    keep = builder.icmp_signed("!=", add, ir.Constant(i64, 0))
    none, fma = ir.Constant(vector, [0.0] * LANES), f"llvm.fma.v{LANES}f32"
    start = [builder.select(keep, ops.emit_load(builder, target, vector), none) for target in targets]

    def step(index: Any, values: list[Any]) -> list[Any]:
        row = values[-1]
        rights = [ops.emit_load(builder, builder.add(row, ir.Constant(i64, 4 * LANES * j)), vector) for j in range(nv)]
        for j in range(0, nv if mr < OUTER_ROWS else 0, 16 // LANES):
            ops.emit_prefetch(builder, builder.add(builder.add(row, ahead), ir.Constant(i64, 4 * LANES * j)))
        result = []
        for i in range(mr):
            single = ops.emit_load(builder, builder.add(a_rows[i], index), ir.FloatType())
            left = ops.emit_splat(builder, single, vector)
            result += [
                ops.emit_call(builder, fma, vector, left, rights[j], values[i * nv + j]) for j in range(nv)
            ]
        return [*result, builder.add(row, ldb)]

    stop = builder.shl(k, ir.Constant(i64, 2))
    sums = loop(builder, ir.Constant(i64, 0), stop, 4, [*start, b], step)
    for value, target in zip(sums[:-1], targets, strict=True):
        ops.emit_store(builder, target, value)


# --- linear -------------------------------------------------------------------------------------------------


def rows_times_weight(x: int, ldx: int, m: int, w: int, ldw: int, n: int, y: int, ldy: int, k: int) -> None:
    """y[m, n] = x[m, k] w[n, k]^T on the calling thread; strides in bytes. Compiled into the kernels that call it."""
    for first in range(0, n & -4, PANEL):
        last = min(first + PANEL, n & -4)
        ahead = w + (first + PANEL) * ldw  # rows of the next panel, fetched while this one is used
        i = 0
        while i + TILE_ROWS <= m:
            for j in range(first, last, 4):
                place = y + i * ldy + 4 * j
                dot_tile(TILE_ROWS, 4, x + i * ldx, ldx, w + j * ldw, ldw, place, ldy, k, ahead)
                ahead += 2 * ldw if TILE_ROWS > 3 else 4 * ldw
            i += TILE_ROWS
        while i < m:
            step = min(m - i, 3)
            for j in range(first, last, 4):
                place = y + i * ldy + 4 * j
                if step == 3:
                    dot_tile(3, 4, x + i * ldx, ldx, w + j * ldw, ldw, place, ldy, k, ahead)
                elif step == 2:
                    dot_tile(2, 4, x + i * ldx, ldx, w + j * ldw, ldw, place, ldy, k, ahead)
                else:
                    dot_tile(1, 4, x + i * ldx, ldx, w + j * ldw, ldw, place, ldy, k, ahead)
                ahead += 4 * ldw
            i += step
    for j in range(n & -4, n):
        for i in range(m):
            dot_tile(1, 1, x + i * ldx, ldx, w + j * ldw, ldw, y + i * ldy + 4 * j, ldy, k, 0)


def _linear_kernel(args: Any) -> None:
    """args: tickets, x, weight, bias (0: none), y, m, n, k, rows a piece, threads, rows a share, a counter a share.

    A thread walks through its own share of the rows, so that it reads memory in order, then helps with the
    others'.
    """
    x, w, bias, y, m, n, k, piece = args[1], args[2], args[3], args[4], args[5], args[6], args[7], args[8]
    threads, share = args[9], args[10]
    ticket = take(args, 0)
    for turn in range(threads):
        part = (ticket + turn) % threads
        low = part * share
        high = min(low + share, n)
        while True:
            start = low + take(args, 11 + part) * piece
            if start >= high:
                break
            count = min(piece, high - start)
            tile_rows(x, 4 * k, m, w + 4 * k * start, 4 * k, count, y + 4 * start, 4 * n, k)
            if bias != 0:
                for i in range(m):
                    for j in range(start, start + count):
                        place = y + 4 * (i * n + j)
                        sstore(place, sload(place) + sload(bias + 4 * j))


def single_row(
    x: int, w: int, bias: int, y: int, n: int, k: int, low: int, stride: int, start: int, stop: int
) -> None:
    """One row of x times rows low + [start, stop) of w and those 1 .. STREAMS - 1 strides on: STREAMS streams."""
    for j in range(low + start, low + stop):
        if j + (STREAMS - 1) * stride < n:
            dot_tile(STREAMS, 1, w + 4 * k * j, 4 * k * stride, x, 0, y + 4 * j, 4 * stride, k, 0)
        else:
            for i in range(j, n, stride):
                dot_tile(1, 1, w + 4 * k * i, 0, x, 0, y + 4 * i, 0, k, 0)
        if bias != 0:
            for i in range(j, min(n, j + STREAMS * stride), stride):
                sstore(y + 4 * i, sload(y + 4 * i) + sload(bias + 4 * i))


def _single_kernel(args: Any) -> None:
    """args as those of `_linear_kernel` with m = 1; a share is STREAMS runs of `share` rows."""
    x, w, bias, y, n, k, piece = args[1], args[2], args[3], args[4], args[6], args[7], args[8]
    threads, share = args[9], args[10]
    ticket = take(args, 0)
    for turn in range(threads):
        part = (ticket + turn) % threads
        while True:
            start = take(args, 11 + part) * piece
            if start >= share:
                break
            one_row(x, w, bias, y, n, k, part * STREAMS * share, share, start, min(start + piece, share))


tile_rows: Any = None  # `rows_times_weight` for use inside kernels, bound by `inner`
one_row: Any = None
_kernel: Any = None
_single: Any = None


def inner(function: Callable[..., Any]) -> Any:
    """Compile a function of int64 that kernels call."""
    load()
    import numba

    return numba.njit(error_model="numpy", inline="never")(function)


def load_linear() -> Any:
    """Compile or load the kernel of `linear`."""
    global _kernel, _single, tile_rows, one_row
    if _kernel is None:
        tile_rows, one_row = inner(rows_times_weight), inner(single_row)
        _single = compile_kernel(_single_kernel)
        _kernel = compile_kernel(_linear_kernel)
    return _kernel


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x[m, k] weight[n, k]^T + bias[n] -> [m, n].

    float32 and contiguous operands take the tiles for m <= MAX_SMALL_ROWS and oneDNN's product above;
    anything else is `torch.nn.functional.linear`. Relative error against the float64 product is below 1e-5
    for k up to some thousands.
    """
    m, n, k = x.shape[0], weight.shape[0], weight.shape[1]
    if x.dtype is not torch.float32 or weight.dtype is not torch.float32 or not weight.is_contiguous():
        return torch.nn.functional.linear(x, weight, bias)
    if m > MAX_SMALL_ROWS:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    x = x.contiguous()
    y = x.new_empty((m, n))
    threads = torch.get_num_threads() if m * n * k > 65536 else 1
    if _kernel is None:
        load_linear()
    if m == 1:
        share, piece = -(-n // (threads * STREAMS)), PIECE
    else:
        share, piece = (n // threads + 4) & -4, 16
    launch(
        _single if m == 1 else _kernel, threads, x.data_ptr(), weight.data_ptr(),
        0 if bias is None else bias.data_ptr(), y.data_ptr(), m, n, k, piece, threads, share, *((0,) * threads),
    )  # fmt: skip
    return y
