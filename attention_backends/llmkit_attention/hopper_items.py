"""Of the attention kernel for Hopper: what there is to do, and the warp that loads keys and values for it.

An *item* is a query block (`triton_blocks`) with a KV head. They are taken one after another from a counter in global
memory, a row's last block first, as it has most to do, so that multiprocessors end together whatever their items were.

What passes between warps is a *channel*: (buffers, ready, free), a ring of buffers in shared memory with two barriers
for each: filled, and not needed any more. Use n of a channel is in buffer n % SLOTS.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

SLOTS = gl.constexpr(2)
CHUNK = gl.constexpr(64)  # numbers of a head in a copy: 128 bytes, what shared memory is swizzled by
FIELDS = gl.constexpr(8)  # of an item, with those that are not used


@gluon.jit
def phase_of(use):
    """Of a barrier of a channel, at this use of the channel."""
    return use // SLOTS & 1


@gluon.jit
def _row_of(starts_ptr, num_rows, block, BLOCK_Q: gl.constexpr):
    """The last row whose query blocks begin at `block` or before it; by one warp."""
    row_of_block = -1
    for start in range(0, num_rows, 128):
        row = start + gl.arange(0, 128, layout=gl.BlockedLayout([4], [32], [1], [0]))
        begins = gl.load(starts_ptr + row, mask=row < num_rows, other=2**30) // BLOCK_Q + row
        row_of_block += gl.sum((begins <= block).to(gl.int32), 0)
    return row_of_block


@gluon.jit
def _send_item(items, number, fields):
    """As use `number` of the channel `items`."""
    buffers, ready, free = items
    slot = number % SLOTS
    mbarrier.wait(free.index(slot), phase_of(number) ^ 1)
    for i in gl.static_range(len(fields)):
        field = gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + fields[i]
        buffers.index(slot * FIELDS + i).store(field)
    mbarrier.arrive(ready.index(slot), count=1)


@gluon.jit
def receive_item(items, number):
    """(KV head, first token of the row in the batch, its number of tokens, first token of the query block within the
    row, tokens before the row's in the cache) of use `number`; KV head -1 if there are no more items."""
    buffers, ready, free = items
    slot = number % SLOTS
    mbarrier.wait(ready.index(slot), phase_of(number))
    fields = ()
    for i in gl.static_range(5):
        field = buffers.index(slot * FIELDS + i).load(gl.BlockedLayout([1], [32], [4], [0]))
        fields = fields + (gl.sum(field, 0),)  # noqa: RUF005, Gluon unpacks nothing
    mbarrier.arrive(free.index(slot), count=1)
    return fields


@gluon.jit
def _page_places(
    table_ptr, tile, num_pages, kv_head, NUM_KV_HEADS: gl.constexpr, PAGE: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Of the pages of a tile of keys, the number of the first key in the cache as rows of a head each."""
    places = ()
    for i in gl.static_range(BLOCK_N // PAGE):
        index = gl.minimum(tile * (BLOCK_N // PAGE) + i, num_pages - 1)
        head = gl.load(table_ptr + index) * (2 * NUM_KV_HEADS) + kv_head
        places = places + (head * PAGE,)  # noqa: RUF005, Gluon unpacks nothing
    return places


@gluon.jit
def _fetch(cache, places, offset, channel, use):
    """The tile of keys or values at these places into the buffer of this use, page by page."""
    buffers, ready, free = channel
    slot = use % SLOTS
    PAGE: gl.constexpr = cache.block_shape[0]
    BLOCK_N: gl.constexpr = buffers.shape[1]
    CHUNKS: gl.constexpr = buffers.shape[2] // CHUNK
    PAGES: gl.constexpr = BLOCK_N // PAGE
    mbarrier.wait(free.index(slot), phase_of(use) ^ 1)
    mbarrier.expect(ready.index(slot), BLOCK_N * buffers.shape[2] * 2)
    # A tile lies in shared memory as all its first chunks, then all its second ones.
    parts = buffers.index(slot)._reinterpret(cache.dtype, [CHUNKS * PAGES, PAGE, CHUNK], cache.layout)
    for i in gl.static_range(PAGES):
        for c in gl.static_range(CHUNKS):
            place = [places[i] + offset, c * CHUNK]
            tma.async_copy_global_to_shared(cache, place, ready.index(slot), parts.index(c * PAGES + i))


@gluon.jit
def produce(
    cache, rows, counter_ptr, items, keys, values,
    NUM_KV_HEADS: gl.constexpr, BLOCK_Q: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Take items, tell the warps that compute of them, and load their keys and values, the last tile first.

    rows: (starts_ptr, seq_lens_ptr, table_ptr, table_stride, num_rows, num_blocks, min_tokens).
    """
    starts_ptr, seq_lens_ptr, table_ptr, table_stride, num_rows, num_blocks, min_tokens = rows
    BLOCK_N: gl.constexpr = keys[0].shape[1]
    num_items = num_blocks * NUM_KV_HEADS
    item = gl.atomic_add(counter_ptr, 1)
    number = 0
    use = 0
    while item < num_items:
        next_item = gl.atomic_add(counter_ptr, 1)
        kv_head = item % NUM_KV_HEADS
        block = num_blocks - 1 - item // NUM_KV_HEADS
        row = _row_of(starts_ptr, num_rows, block, BLOCK_Q)
        start = gl.load(starts_ptr + row)
        length = gl.load(starts_ptr + row + 1) - start
        first = (block - (start // BLOCK_Q + row)) * BLOCK_Q
        if (first < length) & (length > min_tokens):
            seq_len = gl.load(seq_lens_ptr + row)
            context = seq_len - length
            _send_item(items, number, (kv_head, start, length, first, context))
            number += 1
            tiles = gl.cdiv(context + gl.minimum(first + BLOCK_Q, length), BLOCK_N)
            pages_ptr = table_ptr + row.to(gl.int64) * table_stride
            for i in range(tiles):
                places = _page_places(
                    pages_ptr, tiles - 1 - i, gl.cdiv(seq_len, PAGE), kv_head, NUM_KV_HEADS, PAGE, BLOCK_N
                )
                _fetch(cache, places, 0, keys, use)
                _fetch(cache, places, NUM_KV_HEADS * PAGE, values, use)
                use += 1
        item = next_item
    if item == num_items + gl.num_programs(0) - 1:  # nobody takes another: ready for the next launch
        gl.atomic_xchg(counter_ptr, 0)
    _send_item(items, number, (-1,))
