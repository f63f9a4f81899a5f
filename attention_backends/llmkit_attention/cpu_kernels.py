"""Paged causal attention on CPUs, for batches that mix prefill and decode rows.

Work items are (sequence, KV head, tile of queries). All query heads of a KV head are rows of one tile, so K
and V are read once for them. Threads take items from a counter, the long tiles of a sequence first. Nothing
is gathered or padded to the longest sequence: a tile walks over blocks of BLOCK keys, page by page, with a
running maximum and sum.

Source: Dao et al., "FlashAttention" (2022), for the blocked softmax; Kwon et al., "PagedAttention" (2023),
for the page table.
"""

from __future__ import annotations

from typing import Any

import torch

from llmkit.jit import runtime, tiles
from llmkit.jit import vector as ops
from llmkit_attention.cpu_cache import HEAD_ALIGNMENT, dense_rows
from llmkit_attention.cpu_prefixes import SharedPrefixes

BLOCK = 64  # keys a block
TILE = 96  # rows (query tokens x heads of a group) of a prefill tile
MASKED = -1e30  # finite: a block that is masked as a whole must not make NaN; its weights vanish with the next maximum
LANES = 8  # set by load(), as everything below; constants of the compiled code
ROWS = 6
VECTORS = 2

_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_attention: Any = None
fetch_block: Any = None  # inner functions, bound by load()
fetch_columns: Any = None
score_rows: Any = None
value_rows: Any = None
softmax_row: Any = None
block_scores: Any = None
block_values: Any = None
read_query: Any = None
decode_keys: Any = None
write_rows: Any = None
decode_item: Any = None
shared_item: Any = None
prefill_item: Any = None


# args of _attention_kernel after the counter
_Q, _KV, _TABLE, _STARTS, _LENS, _OUT, _SCRATCH, _TICKET = 1, 2, 3, 4, 5, 6, 7, 8
_SEQS, _PAGES, _HQ, _HK, _D, _PAGE_SHIFT, _FORMAT = 9, 10, 11, 12, 13, 14, 15
_WINDOW, _CAP, _SCALE, _TILE_TOKENS, _SCRATCH_SIZE, _Q_ROW = 16, 17, 18, 19, 20, 21  # _Q_ROW: elements
_GROUPS, _NUM_GROUPS, _MEMBERS, _GROUPED = 22, 23, 24, 25  # as in SharedPrefixes


def _fetch_block(args: Any, table: int, head: int, first: int, count: int, part: int, target: int) -> None:
    """Copy K (part 0) or V (part 1) of keys first .. first + count of one KV head to float32 rows at `target`."""
    d, shift, form = args[_D], args[_PAGE_SHIFT], args[_FORMAT]
    size = 4 if form == 0 else 2
    mask = (1 << shift) - 1
    for j in range(count):
        key = first + j
        page = ops.iload(table + 4 * (key >> shift))
        row = ((((page * 2 + part) * args[_HK] + head) << shift) + (key & mask)) * d
        source = args[_KV] + row * size
        for c in range(0, d, LANES):
            if form == 0:
                value = ops.vload(source + 4 * c)
            elif form == 1:
                value = ops.vload_bfloat(source + 2 * c)
            else:
                value = ops.vload_half(source + 2 * c)
            ops.vstore(target + 4 * (j * d + c), value)


def _fetch_columns(args: Any, table: int, head: int, start: int, begin: int, count: int, buffer: int) -> None:
    """K of keys start + begin .. start + count of one KV head, transposed: float32 [d, BLOCK] behind BLOCK rows of d at
    `buffer`. begin: a multiple of LANES. Columns beyond count are what lies there. Their V is fetched ahead."""
    d, shift, heads = args[_D], args[_PAGE_SHIFT], args[_HK]
    columns, page_bytes = buffer + 4 * BLOCK * d, 4 * (d << shift)
    direct = args[_FORMAT] == 0 and (1 << shift) >= LANES
    if not direct:
        fetch_block(args, table, head, start + begin, count - begin, 0, buffer + 4 * begin * d)
    for j in range(begin, count, LANES):
        source, ahead = buffer + 4 * j * d, 0
        if direct:
            key = start + j
            page = ops.iload(table + 4 * (key >> shift))
            source = args[_KV] + (page * 2 * heads + head) * page_bytes + 4 * (key & ((1 << shift) - 1)) * d
            ahead = heads * page_bytes
        for c in range(0, d, LANES):
            ops.transpose(source + 4 * c, 4 * d, columns + 4 * (c * BLOCK + j), 4 * BLOCK)
            if ahead > 0 and c & 15 == 0:
                for row in range(LANES):
                    ops.prefetch(source + ahead + 4 * (row * d + c))


def _score_rows(q: int, rows: int, columns: int, count: int, d: int, s: int) -> None:
    """s[row, j] = q[row, :] k[j, :] for few rows and j < count; columns: K transposed, as `_fetch_columns` leaves it.

    A score is added up in the order of d, as in `_block_scores`: an answer does not depend on what is computed with it.
    """
    n, wide, span = 4 * d, 4 * BLOCK, VECTORS * LANES
    for j in range(0, count, span):
        i = 0
        while i < rows:
            left, place = q + i * n, s + i * wide + 4 * j
            if rows - i >= 3:
                tiles.outer_tile(3, VECTORS, left, n, columns + 4 * j, wide, place, wide, d, 0, 0)
                i += 3
            else:
                tiles.outer_tile(1, VECTORS, left, n, columns + 4 * j, wide, place, wide, d, 0, 0)
                i += 1


def _value_rows(p: int, rows: int, v: int, count: int, d: int, o: int, ahead: int) -> None:
    """o[row, :] += p[row, :count] v[:count, :] for few rows. The rows v + ahead are prefetched."""
    n, wide, span = 4 * d, 4 * BLOCK, VECTORS * LANES
    for c in range(0, d - span + 1, span):
        i = 0
        while i < rows:
            left, right, place = p + i * wide, v + 4 * c, o + i * n + 4 * c
            if rows - i >= 3:
                tiles.outer_tile(3, VECTORS, left, wide, right, n, place, n, count, 1, ahead)
                i += 3
            else:
                tiles.outer_tile(1, VECTORS, left, wide, right, n, place, n, count, 1, ahead)
                i += 1
    for c in range(d // span * span, d, LANES):
        for i in range(rows):
            tiles.outer_tile(1, 1, p + i * wide, wide, v + 4 * c, n, o + i * n + 4 * c, n, count, 1, ahead)


def _softmax_row(s: int, low: int, high: int, count: int, cap: float, state: int, o: int, d: int) -> None:
    """Turn scores of keys [low, high) of a block of `count` into weights; rescale the output row by the new maximum.

    state holds the running maximum and sum of the row. Scores outside [low, high) get the weight 0.
    """
    padded = (count + LANES - 1) // LANES * LANES
    if cap > 0:
        scale, one, two = ops.vsplat(cap), ops.vsplat(1.0), ops.vsplat(2.0)
        for j in range(0, padded, LANES):
            power = ops.vexp(ops.vdiv(ops.vmul(two, ops.vload(s + 4 * j)), scale))
            ops.vstore(s + 4 * j, ops.vmul(scale, ops.vsub(one, ops.vdiv(two, ops.vadd(power, one)))))
    for j in range(0, min(low, padded)):
        ops.sstore(s + 4 * j, MASKED)
    for j in range(max(0, high), padded):
        ops.sstore(s + 4 * j, MASKED)
    top = ops.vload(s)
    for j in range(LANES, padded, LANES):
        top = ops.vmax(top, ops.vload(s + 4 * j))
    before = ops.sload(state)
    maximum = max(before, ops.vtop(top))
    shift = ops.vsplat(maximum)
    total = ops.vsplat(0.0)
    for j in range(0, padded, LANES):
        weight = ops.vexp(ops.vsub(ops.vload(s + 4 * j), shift))
        ops.vstore(s + 4 * j, weight)
        total = ops.vadd(total, weight)
    old = ops.sload(state + 4)
    if maximum > before:
        factor = ops.vexp(ops.vsub(ops.vsplat(before), shift))
        for c in range(0, d, LANES):
            ops.vstore(o + 4 * c, ops.vmul(ops.vload(o + 4 * c), factor))
        old = old * ops.vtop(factor)
    ops.sstore(state, maximum)
    ops.sstore(state + 4, old + ops.vsum(total))


def _decode_keys(
    args: Any, seq: int, head: int, first: int, length: int, q: int, o: int, s: int, state: int, buffer: int
) -> None:
    """Attend from one token's query heads of KV head `head` to keys first .. length of its sequence.

    q, o: [group, d]; s: [group, BLOCK] of scratch; state: maximum and sum of each row; buffer: 2 x BLOCK rows of d.
    """
    d, group, shift, cap = args[_D], args[_HQ] // args[_HK], args[_PAGE_SHIFT], ops.as_float(args[_CAP])
    table = args[_TABLE] + 4 * seq * args[_PAGES]
    direct = args[_FORMAT] == 0
    page_bytes = 4 * (d << shift)
    start = first - (first & (BLOCK - 1))
    while start < length:
        count = min(BLOCK, length - start)
        begin = max(0, first - start) & -LANES
        fetch_columns(args, table, head, start, begin, count, buffer)
        score_rows(q, group, buffer + 4 * BLOCK * d, count, d, s)
        for g in range(group):
            softmax_row(s + 4 * g * BLOCK, first - start, count, count, cap, state + 8 * g, o + 4 * g * d, d)
        if direct:
            j = begin
            while j < count:
                key = start + j
                offset = key & ((1 << shift) - 1)
                take = min((1 << shift) - offset, count - j)
                page = ops.iload(table + 4 * (key >> shift))
                place = args[_KV] + ((page * 2 + 1) * args[_HK] + head) * page_bytes + 4 * offset * d
                ahead = ops.iload(table + 4 * (min(key + BLOCK, length - 1) >> shift))
                ahead = ((ahead - page) * 2 - 1) * args[_HK] * page_bytes
                value_rows(s + 4 * j, group, place, take, d, o, ahead)
                j += take
        else:
            fetch_block(args, table, head, start + begin, count - begin, 1, buffer)
            value_rows(s + 4 * begin, group, buffer, count - begin, d, o, 0)
        start += BLOCK


def _write_rows(args: Any, token: int, head: int, rows: int, o: int, state: int) -> None:
    """Divide rows of o [rows, d] by their sums, into the output: query heads of `head`, from `token` on."""
    d, group = args[_D], args[_HQ] // args[_HK]
    for r in range(rows):
        factor = ops.vsplat(1.0 / ops.sload(state + 8 * r + 4))
        target = args[_OUT] + 4 * (((token + r // group) * args[_HQ] + head * group + r % group) * d)
        for c in range(0, d, LANES):
            ops.vstore(target + 4 * c, ops.vmul(ops.vload(o + 4 * (r * d + c)), factor))


def _read_query(args: Any, token: int, head: int, rows: int, q: int, o: int, state: int) -> None:
    """Rows of q from the query heads of `head`, from `token` on, scaled; o and the state as before the first key."""
    d, group, scale = args[_D], args[_HQ] // args[_HK], ops.as_float(args[_SCALE])
    for r in range(rows):
        source = args[_Q] + 4 * ((token + r // group) * args[_Q_ROW] + (head * group + r % group) * d)
        for c in range(0, d, LANES):
            ops.vstore(q + 4 * (r * d + c), ops.vmul(ops.vload(source + 4 * c), ops.vsplat(scale)))
            ops.vstore(o + 4 * (r * d + c), ops.vsplat(0.0))
        ops.sstore(state + 8 * r, MASKED)
        ops.sstore(state + 8 * r + 4, 0.0)


def _decode_item(args: Any, seq: int, head: int, scratch: int) -> None:
    """One query token of one sequence, all query heads of KV head `head`."""
    d, group = args[_D], args[_HQ] // args[_HK]
    length = ops.iload(args[_LENS] + 4 * seq)
    first = max(0, length - args[_WINDOW]) if args[_WINDOW] > 0 else 0
    token = ops.iload(args[_STARTS] + 4 * seq)
    q, o, s = scratch, scratch + 4 * group * d, scratch + 8 * group * d
    state = s + 4 * group * BLOCK
    read_query(args, token, head, group, q, o, state)
    decode_keys(args, seq, head, first, length, q, o, s, state, state + 8 * group)
    write_rows(args, token, head, group, o, state)


def _shared_item(args: Any, part: int, head: int, scratch: int) -> None:
    """One query token of each of several sequences: together over the keys that they share, then each over its own."""
    d, group = args[_D], args[_HQ] // args[_HK]
    place = args[_GROUPS] + 12 * part
    members, count, shared = args[_MEMBERS] + 4 * ops.iload(place), ops.iload(place + 4), ops.iload(place + 8)
    rows = count * group
    padded = (rows + ROWS - 1) // ROWS * ROWS
    q, o, s = scratch, scratch + 4 * padded * d, scratch + 8 * padded * d
    state = s + 4 * padded * BLOCK
    k = state + 8 * padded
    for i in range(count):
        token = ops.iload(args[_STARTS] + 4 * ops.iload(members + 4 * i))
        at = 4 * i * group * d
        read_query(args, token, head, group, q + at, o + at, state + 8 * i * group)
    table = args[_TABLE] + 4 * ops.iload(members) * args[_PAGES]
    for start in range(0, shared, BLOCK):
        block_scores(args, table, head, start, BLOCK, q, padded, s, k)
        for r in range(rows):
            at = o + 4 * r * d
            softmax_row(s + 4 * r * BLOCK, 0, BLOCK, BLOCK, ops.as_float(args[_CAP]), state + 8 * r, at, d)
        block_values(args, table, head, start, BLOCK, s, padded, o, k)
    for i in range(count):
        seq = ops.iload(members + 4 * i)
        first, at = i * group, 4 * i * group * d
        here = state + 8 * first
        length = ops.iload(args[_LENS] + 4 * seq)
        decode_keys(args, seq, head, shared, length, q + at, o + at, s + 4 * first * BLOCK, here, k)
        write_rows(args, ops.iload(args[_STARTS] + 4 * seq), head, group, o + at, here)


def _block_scores(
    args: Any, table: int, head: int, start: int, count: int, q: int, padded: int, s: int, buffer: int
) -> None:
    """s[row, j] = q[row, :] k[start + j, :] for `padded` rows, a multiple of ROWS, and j < count <= BLOCK."""
    d = args[_D]
    kt = buffer + 4 * BLOCK * d
    n, wide = 4 * d, 4 * BLOCK
    fetch_columns(args, table, head, start, 0, count, buffer)  # scores beyond count are masked later
    for r in range(0, padded, ROWS):
        for j in range(0, count, VECTORS * LANES):
            place = s + r * wide + 4 * j
            tiles.outer_tile(ROWS, VECTORS, q + r * n, n, kt + 4 * j, wide, place, wide, d, 0, 0)


def _block_values(
    args: Any, table: int, head: int, start: int, count: int, s: int, padded: int, o: int, buffer: int
) -> None:
    """o[row, :] += s[row, :count] v[start:start + count, :] for `padded` rows, a multiple of ROWS."""
    d = args[_D]
    n, wide, span = 4 * d, 4 * BLOCK, VECTORS * LANES
    fetch_block(args, table, head, start, count, 1, buffer)
    for c in range(0, d - span + 1, span):
        for r in range(0, padded, ROWS):
            place = o + r * n + 4 * c
            tiles.outer_tile(ROWS, VECTORS, s + r * wide, wide, buffer + 4 * c, n, place, n, count, 1, 0)
    for c in range(d // span * span, d, LANES):
        for r in range(0, padded, ROWS):
            tiles.outer_tile(ROWS, 1, s + r * wide, wide, buffer + 4 * c, n, o + r * n + 4 * c, n, count, 1, 0)


def _prefill_item(args: Any, seq: int, head: int, tile: int, scratch: int) -> None:
    """Tile `tile` of the query tokens of one sequence, all query heads of KV head `head`; rows are (token, head)."""
    d, group = args[_D], args[_HQ] // args[_HK]
    table = args[_TABLE] + 4 * seq * args[_PAGES]
    length = ops.iload(args[_LENS] + 4 * seq)
    query, end = ops.iload(args[_STARTS] + 4 * seq), ops.iload(args[_STARTS] + 4 * seq + 4)
    position = length - (end - query) + tile * args[_TILE_TOKENS]  # of the tile's first token
    tokens = min(args[_TILE_TOKENS], end - query - tile * args[_TILE_TOKENS])
    query += tile * args[_TILE_TOKENS]
    rows = tokens * group
    padded = (rows + ROWS - 1) // ROWS * ROWS
    window, cap = args[_WINDOW], ops.as_float(args[_CAP])
    q, o, s = scratch, scratch + 4 * padded * d, scratch + 8 * padded * d
    state = s + 4 * padded * BLOCK
    k = state + 8 * padded
    read_query(args, query, head, rows, q, o, state)
    for c in range(4 * rows * d, 4 * padded * d, 4 * LANES):
        ops.vstore(q + c, ops.vsplat(0.0))
        ops.vstore(o + c, ops.vsplat(0.0))
    start = max(0, position - window + 1) & -BLOCK if window > 0 else 0
    while start < position + tokens:
        count = min(BLOCK, position + tokens - start)
        block_scores(args, table, head, start, count, q, padded, s, k)
        for r in range(rows):
            here = position + r // group
            low = here - window + 1 - start if window > 0 else 0
            softmax_row(s + 4 * r * BLOCK, low, here + 1 - start, count, cap, state + 8 * r, o + 4 * r * d, d)
        block_values(args, table, head, start, count, s, padded, o, k)
        start += BLOCK
    write_rows(args, query, head, rows, o, state)


def _attention_kernel(args: Any) -> None:
    scratch = args[_SCRATCH] + ops.take(args, _TICKET) * args[_SCRATCH_SIZE]
    tile_tokens = args[_TILE_TOKENS]
    item = ops.take(args, 0)
    base = 0
    # All sequences of a head, then the next head: keys that sequences share stay in the second cache.
    for head in range(args[_HK]):
        for part in range(args[_NUM_GROUPS]):
            if item == base:
                shared_item(args, part, head, scratch)
                item = ops.take(args, 0)
            base += 1
        for seq in range(args[_SEQS]):
            if args[_NUM_GROUPS] > 0 and ops.iload(args[_GROUPED] + 4 * seq) != 0:
                continue
            tokens = ops.iload(args[_STARTS] + 4 * seq + 4) - ops.iload(args[_STARTS] + 4 * seq)
            tiles = (tokens + tile_tokens - 1) // tile_tokens
            while item < base + tiles:
                if tokens == 1:
                    decode_item(args, seq, head, scratch)
                else:
                    prefill_item(args, seq, head, base + tiles - 1 - item, scratch)
                item = ops.take(args, 0)
            base += tiles


def load() -> None:
    """Compile or load the kernel (about 5 s the first time ever, then 0.1 s)."""
    global LANES, ROWS, VECTORS, _attention
    global fetch_block, fetch_columns, score_rows, value_rows, softmax_row, block_scores, block_values
    global read_query, decode_keys, write_rows, decode_item, shared_item, prefill_item
    if _attention is not None:
        return
    runtime.load()
    LANES, ROWS, VECTORS = ops.LANES, tiles.OUTER_ROWS, tiles.OUTER_VECTORS
    fetch_block, softmax_row = runtime.inner(_fetch_block), runtime.inner(_softmax_row)
    fetch_columns = runtime.inner(_fetch_columns)
    score_rows, value_rows = runtime.inner(_score_rows), runtime.inner(_value_rows)
    block_scores, block_values = runtime.inner(_block_scores), runtime.inner(_block_values)
    read_query, write_rows = runtime.inner(_read_query), runtime.inner(_write_rows)
    decode_keys = runtime.inner(_decode_keys)
    decode_item, shared_item = runtime.inner(_decode_item), runtime.inner(_shared_item)
    prefill_item = runtime.inner(_prefill_item)
    _attention = runtime.compile_kernel(_attention_kernel)


def unsupported(kv: torch.Tensor, num_query_heads: int) -> list[str]:
    """Why `paged_attention` cannot work on this cache and number of query heads; empty when it can."""
    _, _, heads, page_size, head_size = kv.shape
    reasons = []
    if kv.dtype not in _FORMATS:
        reasons.append(f"cache dtype {kv.dtype} is not float32, bfloat16 or float16")
    if head_size % HEAD_ALIGNMENT:
        reasons.append(f"head size {head_size} is not a multiple of {HEAD_ALIGNMENT}")
    if page_size & (page_size - 1):
        reasons.append(f"page size {page_size} is not a power of two")
    if num_query_heads % heads:
        reasons.append(f"{num_query_heads} query heads are not a multiple of {heads} KV heads")
    if not kv.is_contiguous() or kv.device.type != "cpu":
        reasons.append("the cache is not a contiguous CPU tensor")
    return reasons


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    out: torch.Tensor,
    prefixes: SharedPrefixes | None = None,
) -> None:
    """Causal attention of each sequence's last tokens over its paged keys and values, into `out`.

    q, out: float32 [tokens, query heads, head size], rows of q any distance apart; kv: [pages, 2, KV heads,
    page size, head size] in float32, bfloat16 or float16; block_table: int32 [sequences, max pages];
    query_start_loc: int32 [sequences + 1], rows of q; seq_lens: int32 [sequences], total lengths in tokens, this
    step's (already written to kv)
    included. A key is seen by the queries at its position and later, with sliding_window > 0 only by those
    less than sliding_window after it; soft_cap > 0 replaces a score s by soft_cap * tanh(s / soft_cap).
    Sequences may have no query token. Relative error against float64 is below 1e-5 for a float32 cache.
    prefixes: sequences that begin with the same pages, as `shared_prefixes` finds them with `block` = BLOCK and
    `most_sequences` = most_together(group); not used with a sliding window.
    ValueError names what is unsupported.
    """
    heads, page_size, d = kv.shape[2], kv.shape[3], kv.shape[4]
    query_heads = q.shape[1]
    if _attention is None:
        load()
    if d % HEAD_ALIGNMENT or page_size & (page_size - 1) or query_heads % heads or kv.dtype not in _FORMATS:
        raise ValueError("; ".join(unsupported(kv, query_heads)))
    if q.dtype is not torch.float32 or not (out.is_contiguous() and block_table.is_contiguous()) or not dense_rows(q):
        raise ValueError("q must be float32 with contiguous rows, and out and block_table contiguous")
    group = query_heads // heads
    tile_tokens = max(1, TILE // group)
    rows = max(TILE, group) + ROWS
    size = (4 * (2 * rows * d + rows * BLOCK + 2 * rows + 2 * BLOCK * d) + 127) & -64
    threads = torch.get_num_threads()
    runtime.launch(
        _attention, threads,
        q.data_ptr(), kv.data_ptr(), block_table.data_ptr(), query_start_loc.data_ptr(), seq_lens.data_ptr(),
        out.data_ptr(), runtime.scratch_address(threads * size), 0, seq_lens.shape[0], block_table.shape[1],
        query_heads, heads, d, page_size.bit_length() - 1, _FORMATS[kv.dtype], sliding_window,
        runtime.float_bits(soft_cap), runtime.float_bits(scale), tile_tokens, size, q.stride(0),
        *_addresses(prefixes if sliding_window <= 0 else None),
    )  # fmt: skip


def most_together(group: int) -> int:
    """How many sequences with `group` query heads a KV head fit in one part of a shared prefix."""
    return max(1, TILE // group)


def _addresses(prefixes: SharedPrefixes | None) -> tuple[int, int, int, int]:
    if prefixes is None:
        return 0, 0, 0, 0
    parts, members, grouped = prefixes.parts, prefixes.members, prefixes.grouped
    return parts.ctypes.data, len(parts), members.ctypes.data, grouped.ctypes.data
