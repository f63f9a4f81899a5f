"""What is launched for a batch: which rows in which tiles, and over how many programs their keys are split.

All of it affects speed alone: the kernels read lengths on the device and are right with any numbers from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmkit_attention.triton_tiles import Device, QueryClass, Tile

IntArray = np.ndarray[Any, np.dtype[np.int32]]

TileChoice = Callable[[QueryClass], Tile]

_LEAST_SPAN = 128  # keys; shorter splits cost more to combine than they save
_WORKSPACE_BYTES = 128 * 2**20
_MOST_PREFIX_SPLITS = 16
MOST_PREFIX_PARTS = 1024  # rows times splits: what is written has to be read again
_NO_LIMIT = 2**31 - 1
_FULL_ROUNDS = (
    4  # so often the GPU is to be filled before programs share a multiprocessor: the last round is half empty
)


@dataclass(frozen=True)
class LayerShape:
    """Of a layer, what scheduling depends on. group_size: query heads per KV head; max_group: so many in a program."""

    num_kv_heads: int
    group_size: int
    padded_head_size: int
    sliding_window: int | None
    max_group: int

    @property
    def programs_per_kv_head(self) -> int:
        return -(-self.group_size // self.max_group)

    @property
    def group(self) -> int:
        """Query heads of one program."""
        return -(-self.group_size // self.programs_per_kv_head)


@dataclass(frozen=True)
class Launch:
    """One launch of the attention kernel, over rows with min_tokens < tokens <= max_tokens; splits as the kernel
    takes them. group: query heads of one program. one_per_row: query block r is row r. num_items: 0, or how many
    items (`triton_items`) the rows' keys are cut into; then num_splits is 1.
    """

    tile: Tile
    group: int
    block_m: int
    block_q: int
    num_programs: int
    num_blocks: int
    num_splits: int
    num_items: int
    least_span: int
    min_tokens: int
    max_tokens: int
    one_per_row: bool

    @property
    def num_parts(self) -> int:
        """Partial results per program and query row; 0 if nothing is split."""
        return self.num_items or (self.num_blocks * self.num_splits if self.num_splits > 1 else 0)


@dataclass(frozen=True)
class PrefixLaunch:
    """The launch for keys that rows share. tile_rows: rows of a tile of `block_m` queries. num_items: programs for
    tiles times splits of keys, of which `wanted` fill the GPU; most_splits: of a tile."""

    tile: Tile
    group: int
    block_m: int
    tile_rows: int
    num_programs: int
    num_items: int
    wanted: int
    most_splits: int


def prefix_launch(layer: LayerShape, tile: Tile, device: Device, rows: int, groups: int) -> PrefixLaunch:
    """For up to so many groups among so many rows."""
    block_m, tile_rows = _packed(layer, tile)
    num_programs = layer.num_kv_heads * layer.programs_per_kv_head
    wanted = max(1, device.num_processors * tile.programs_per_processor // num_programs)
    most_splits = max(1, min(_MOST_PREFIX_SPLITS, MOST_PREFIX_PARTS // rows))
    tiles = rows // tile_rows + groups
    return PrefixLaunch(
        tile=tile,
        group=layer.group,
        block_m=block_m,
        tile_rows=tile_rows,
        num_programs=num_programs,
        num_items=max(tiles, min(wanted, tiles * most_splits)),
        wanted=wanted,
        most_splits=most_splits,
    )


def launches(
    query_lens: IntArray, seq_lens: IntArray, layer: LayerShape, tile_of: TileChoice, device: Device
) -> Iterator[Launch]:
    """Rows of few tokens go together, a program each; then all others. query_lens, seq_lens int32[n]: new tokens,
    and tokens in the cache with these."""
    tile = tile_of("decode")
    _, few = _packed(layer, tile)
    longest = int(query_lens.max())
    is_few = None if longest <= few else query_lens <= few
    if is_few is None or is_few.any():
        lens, ends = (query_lens, seq_lens) if is_few is None else (query_lens[is_few], seq_lens[is_few])
        yield _few(layer, tile_of, device, len(query_lens), _visible(lens, ends, layer), few)
    if is_few is None:
        return
    few = few if is_few.any() else 0
    launch = _many(layer, tile_of("short"), device, query_lens, seq_lens, few, is_few)
    if longest > launch.block_q:
        launch = _many(layer, tile_of("long"), device, query_lens, seq_lens, few, is_few)
        at_once = device.num_processors * tile_of("full").programs_per_processor
        blocks = int((-(-query_lens[~is_few] // launch.block_q)).sum())
        if launch.num_splits > 1 or blocks * launch.num_programs >= _FULL_ROUNDS * at_once:
            launch = _many(layer, tile_of("full"), device, query_lens, seq_lens, few, is_few)
    yield launch


def _many(
    layer: LayerShape,
    tile: Tile,
    device: Device,
    query_lens: IntArray,
    seq_lens: IntArray,
    few: int,
    is_few: np.ndarray[Any, np.dtype[np.bool_]],
) -> Launch:
    """The rows that are not few, in as many query blocks as each needs."""
    _, block_q = _packed(layer, tile)
    lens, ends = query_lens[~is_few], seq_lens[~is_few]
    blocks = -(-lens // block_q)
    spans = _visible(np.minimum(lens, block_q), ends, layer)
    average = _visible(np.minimum(lens, block_q), ends - lens // 2, layer)
    num_blocks = int(query_lens.sum()) // block_q + len(query_lens)
    work = int(np.dot(average.astype(np.int64), blocks))
    return _launch(layer, tile, device, num_blocks, int(spans.max()), work, few, None)


def _few(layer: LayerShape, tile_of: TileChoice, device: Device, rows: int, spans: IntArray, few: int) -> Launch:
    """Rows of few tokens: a program for each row and KV head if that fills the GPU, else their keys are split."""
    longest, work = int(spans.max()), int(spans.sum(dtype=np.int64))
    whole = _launch(layer, tile_of("decode"), device, rows, longest, work, 0, few)
    if whole.num_splits == 1:
        return whole
    tile = tile_of("split")
    launch = _launch(layer, tile, device, rows, longest, work, 0, few)
    parts = int((-(-spans // launch.least_span)).sum())
    if launch.num_splits == 1 or 2 * parts >= rows * launch.num_splits:
        return launch
    # Rows are uneven: most splits of a rectangular grid would be empty, and the long ones come last.
    slots = -(-device.num_processors * tile.programs_per_processor // launch.num_programs)
    num_items = rows + max(rows, slots)
    bytes_of_parts = num_items * launch.num_programs * launch.block_m * (layer.padded_head_size + 1) * 4
    if bytes_of_parts > _WORKSPACE_BYTES:
        return launch
    return replace(launch, num_splits=1, num_items=num_items, least_span=_rounded(_LEAST_SPAN, tile))


def _packed(layer: LayerShape, tile: Tile) -> tuple[int, int]:
    """(rows of the tile, tokens of a query block)."""
    block_m = max(tile.block_m, 1 << (layer.group - 1).bit_length())
    return block_m, block_m // layer.group


def _visible(tokens: IntArray, ends: IntArray, layer: LayerShape) -> IntArray:
    """Keys that a block of `tokens` queries before position `ends` sees."""
    if layer.sliding_window is None:
        return ends
    return np.minimum(ends, tokens + layer.sliding_window)


def _launch(
    layer: LayerShape,
    tile: Tile,
    device: Device,
    num_blocks: int,
    longest: int,
    work: int,
    min_tokens: int,
    few: int | None,
) -> Launch:
    """longest: keys of the longest query block, work: keys of all. few: most tokens of a row that has one block."""
    block_m, block_q = _packed(layer, tile)
    num_programs = layer.num_kv_heads * layer.programs_per_kv_head
    longest += 0 if layer.sliding_window is None else tile.block_n
    wanted = device.num_processors * tile.programs_per_processor
    share = -(-work * num_programs // wanted)
    num_splits = _num_splits(longest, max(share, _LEAST_SPAN))
    bytes_per_split = num_blocks * num_programs * block_m * (layer.padded_head_size + 1) * 4
    num_splits = max(1, min(num_splits, _WORKSPACE_BYTES // bytes_per_split))
    return Launch(
        tile=tile,
        group=layer.group,
        block_m=block_m,
        block_q=block_q,
        num_programs=num_programs,
        num_blocks=num_blocks,
        num_splits=num_splits,
        num_items=0,
        least_span=_rounded(-(-longest // num_splits), tile),
        min_tokens=min_tokens,
        max_tokens=_NO_LIMIT if few is None else few,
        one_per_row=few is not None,
    )


def _rounded(keys: int, tile: Tile) -> int:
    return -(-keys // tile.block_n) * tile.block_n


def _num_splits(longest: int, share: int) -> int:
    """A sequence a little longer than a program's share is not worth a second program."""
    return 1 if longest * 4 <= share * 5 else -(-longest // share)
