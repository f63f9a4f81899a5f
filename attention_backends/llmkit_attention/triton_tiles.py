"""Block sizes of the attention kernel: a table by head size and by how many queries a block has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

QueryClass = Literal["decode", "split", "short", "long", "full", "shared"]
"""decode: one token, or as many as fit the smallest tile; split: the same where keys are split over programs; short:
chunks that fit a tile of 64; long: anything; full: the same where there is work for every processor many times over, or
keys are split; as long if the table has none; shared: rows of one token over keys that they share; as short if the
table has none. Tiles of "decode" and "split" have the same block_m."""

MAX_HEAD_SIZE = 256


@dataclass(frozen=True)
class Tile:
    """How one program works.

    block_m: rows of the tile, query tokens times the query heads that share a KV head; grows to hold one token.
    block_n: keys at a time. num_warps, num_stages: as Triton understands them; stages are loads under way.
    phased: whether keys that all queries see have a loop of their own, without masks.
    programs_per_processor: how many programs a multiprocessor should get before keys are split no further.
    max_registers: of a thread, None for as many as the compiler likes; with fewer, more programs fit a multiprocessor.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    phased: bool
    programs_per_processor: int = 2
    max_registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """As Triton compiles a kernel with it."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.max_registers is None else options | {"maxnreg": self.max_registers}


@dataclass(frozen=True)
class Device:
    """What of a GPU matters here. shared_memory: bytes that a program can have."""

    num_processors: int
    shared_memory: int
    compute_capability: tuple[int, int] = (9, 0)


# (largest padded head size, class) for 16-bit arithmetic. Hopper: products by warp groups, tiles of 64 rows and more.
_HOPPER: dict[tuple[int, QueryClass], Tile] = {
    (64, "decode"): Tile(16, 128, 4, 3, False, 3),
    (64, "split"): Tile(16, 128, 4, 3, False, 3),
    (64, "short"): Tile(64, 64, 4, 3, True, 2),
    (64, "long"): Tile(128, 64, 4, 3, True, 2),
    (64, "shared"): Tile(64, 64, 4, 3, False, 1),
    (128, "decode"): Tile(16, 32, 2, 4, False, 4),
    (128, "split"): Tile(16, 64, 4, 4, False, 2),
    (128, "short"): Tile(64, 64, 4, 3, True, 2),
    (128, "long"): Tile(128, 64, 8, 3, True, 1),
    (128, "full"): Tile(128, 64, 8, 2, True, 2, max_registers=128),
    (128, "shared"): Tile(64, 64, 4, 3, False, 1),
    (256, "decode"): Tile(16, 32, 4, 3, False, 3),
    (256, "split"): Tile(16, 32, 4, 3, False, 3),
    (256, "short"): Tile(64, 32, 4, 3, True, 1),
    (256, "long"): Tile(128, 64, 8, 2, True, 1),
}
_OTHERS: dict[tuple[int, QueryClass], Tile] = {
    (64, "decode"): Tile(16, 64, 4, 3, False),
    (64, "split"): Tile(16, 64, 4, 3, False),
    (64, "short"): Tile(64, 64, 4, 3, True),
    (64, "long"): Tile(128, 64, 4, 3, True),
    (128, "decode"): Tile(16, 64, 4, 3, False),
    (128, "split"): Tile(16, 64, 4, 3, False),
    (128, "short"): Tile(64, 32, 4, 3, True),
    (128, "long"): Tile(128, 32, 8, 3, True, 1),
    (256, "decode"): Tile(16, 32, 4, 2, False),
    (256, "split"): Tile(16, 32, 4, 2, False),
    (256, "short"): Tile(64, 32, 4, 2, True),
    (256, "long"): Tile(64, 32, 8, 2, True, 1),
}
# Exact float32 has no matrix units: products are unrolled over registers, so the tiles are small,
# and masks cost nothing beside them: a second loop would only double the time to compile.
_FLOAT32: dict[tuple[int, QueryClass], Tile] = {
    (64, "decode"): Tile(16, 32, 4, 2, False),
    (64, "split"): Tile(16, 32, 4, 2, False),
    (64, "short"): Tile(32, 32, 4, 2, False),
    (64, "long"): Tile(32, 32, 4, 2, False),
    (128, "decode"): Tile(16, 32, 8, 2, False),
    (128, "split"): Tile(16, 32, 8, 2, False),
    (128, "short"): Tile(32, 32, 8, 2, False),
    (128, "long"): Tile(32, 32, 8, 2, False),
    (256, "decode"): Tile(16, 16, 8, 2, False),
    (256, "split"): Tile(16, 16, 8, 2, False),
    (256, "short"): Tile(32, 16, 8, 2, False),
    (256, "long"): Tile(32, 16, 8, 2, False),
}


def tile_for(padded_head_size: int, query_class: QueryClass, itemsize: int, device: Device) -> Tile:
    """The tile for a head size (a power of two up to 256) and element size in bytes, cut down to the shared memory
    that there is."""
    table = _FLOAT32 if itemsize == 4 else _HOPPER if device.compute_capability[0] == 9 else _OTHERS
    size = next(size for size in (64, 128, 256) if padded_head_size <= size)
    tile = table.get((size, query_class)) or table[size, "short" if query_class == "shared" else "long"]
    return _fitted(tile, padded_head_size * itemsize, device.shared_memory)


def _fitted(tile: Tile, row_bytes: int, shared_memory: int) -> Tile:
    """Queries, and keys and values under way, must fit; fewer stages first, then fewer keys."""
    while (tile.block_m + 2 * tile.block_n * tile.num_stages) * row_bytes > shared_memory:
        if tile.num_stages > 2:
            tile = replace(tile, num_stages=tile.num_stages - 1)
        elif tile.block_n > 16:
            tile = replace(tile, block_n=tile.block_n // 2)
        else:
            break
    return tile
