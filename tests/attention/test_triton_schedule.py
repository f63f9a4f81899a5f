"""What the `triton` backend launches for a batch, and which block sizes it takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llmkit_attention.triton_schedule import Launch, LayerShape, launches, prefix_launch
from llmkit_attention.triton_tiles import Device, QueryClass, Tile, tile_for

H200 = Device(132, 232448)
LAYER = LayerShape(num_kv_heads=8, group_size=4, padded_head_size=128, sliding_window=None, max_group=64)
TILES: dict[QueryClass, Tile] = {
    "decode": Tile(16, 32, 2, 4, False, 4),
    "split": Tile(16, 64, 4, 3, False, 2),
    "short": Tile(64, 64, 4, 3, True, 2),
    "long": Tile(128, 64, 8, 3, True, 1),
    "full": Tile(128, 64, 8, 2, True, 2, max_registers=128),
}


def scheduled(rows: list[tuple[int, int]], layer: LayerShape = LAYER, device: Device = H200) -> list[Launch]:
    """rows: (new tokens, tokens in the cache with them)."""
    new, total = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    return list(launches(new, total, layer, TILES.__getitem__, device))


def test_decodes_are_one_launch_of_a_program_a_row_and_head() -> None:
    (launch,) = scheduled([(1, 1024)] * 64)
    assert (launch.num_programs, launch.num_blocks, launch.num_splits) == (8, 64, 1)
    assert launch.one_per_row
    assert (launch.min_tokens, launch.max_tokens) == (0, 4)  # 16 rows of the tile, 4 heads of a group


def test_a_long_sequence_alone_is_split_over_the_processors() -> None:
    (launch,) = scheduled([(1, 65536)])
    assert launch.num_splits * 8 == pytest.approx(2 * 132, abs=8)
    assert launch.num_splits * launch.least_span >= 65536
    assert launch.least_span % launch.tile.block_n == 0


def test_a_short_sequence_is_not_split() -> None:
    (launch,) = scheduled([(1, 150)])
    assert launch.num_splits == 1


def items_of(lengths: list[int], launch: Launch) -> list[int]:
    """Keys of the items that the kernels make of rows of one token."""
    share = -(-sum(lengths) // (launch.num_items - len(lengths)))
    span = max(-(-share // launch.tile.block_n) * launch.tile.block_n, launch.least_span)
    return [min(span, length - start) for length in lengths for start in range(0, length, span)]


def test_uneven_rows_are_cut_into_items_of_one_size() -> None:
    lengths = [700] * 127 + [32768]
    (launch,) = scheduled([(1, length) for length in lengths])
    items = items_of(lengths, launch)
    assert launch.num_splits == 1
    assert 150 < len(items) <= launch.num_items
    assert max(items) < 1000


@pytest.mark.parametrize("seed", range(20))
def test_items_suffice_for_any_lengths(seed: int) -> None:
    """Planned for some lengths, they still do when a captured step is replayed with others."""
    draw = np.random.default_rng(seed)
    rows = int(draw.integers(3, 300))
    lengths = [200] * (rows - 1) + [50_000]
    (launch,) = scheduled([(1, length) for length in lengths])
    if not launch.num_items:
        pytest.skip("a rectangular grid is as good")
    other = draw.integers(1, 2 ** draw.integers(1, 18), rows).tolist()
    items = items_of(other, launch)
    assert len(items) <= launch.num_items
    assert sum(items) == sum(other)


@pytest.mark.parametrize("seed", range(20))
def test_programs_suffice_for_any_groups_that_share_a_prefix(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows = int(draw.integers(4, 600))
    launch = prefix_launch(LAYER, TILES["short"], H200, rows, groups=rows // 4)
    sizes: list[int] = []
    while sum(sizes) + 4 <= rows:
        sizes.append(int(draw.integers(4, max(5, rows - sum(sizes) + 1))))
    tiles = sum(-(-size // launch.tile_rows) for size in sizes)
    splits = max(1, min(launch.wanted // tiles, launch.most_splits))  # as the kernels find it
    assert tiles * splits <= launch.num_items
    assert launch.most_splits * rows <= max(1024, rows)


def test_many_rows_over_one_prefix_fill_the_gpu() -> None:
    launch = prefix_launch(LAYER, TILES["short"], H200, rows=64, groups=16)
    assert launch.tile_rows == 16
    assert launch.num_programs * 4 * min(launch.wanted // 4, launch.most_splits) == pytest.approx(2 * 132, abs=8)


def test_a_window_bounds_what_is_split() -> None:
    (full,) = scheduled([(1, 65536)])
    (windowed,) = scheduled([(1, 65536)], replace(LAYER, sliding_window=512))
    assert windowed.num_splits < full.num_splits
    assert windowed.num_splits * windowed.least_span >= 512 + windowed.tile.block_n


def test_few_and_many_tokens_go_separate_ways() -> None:
    few, many = scheduled([(1, 900), (1500, 3000), (4, 50), (5, 5), (1, 7)])
    assert few.max_tokens == many.min_tokens == 4
    assert few.num_blocks == 5
    assert (many.tile, many.block_q) == (TILES["long"], 32)
    assert many.num_blocks == 1511 // 32 + 5  # enough for any way that 1511 tokens are spread over 5 rows


def test_short_chunks_take_a_smaller_tile() -> None:
    (launch,) = scheduled([(16, 500)])
    assert (launch.tile, launch.block_q, launch.min_tokens) == (TILES["short"], 16, 0)


def test_a_chunk_over_a_long_context_is_split() -> None:
    (launch,) = scheduled([(64, 16384)])
    assert launch.num_splits > 1
    assert launch.tile == TILES["full"]


def test_prompts_that_fill_the_gpu_are_not_split() -> None:
    (launch,) = scheduled([(2048, 2048)] * 8)
    assert launch.num_splits == 1
    assert launch.tile == TILES["full"]


def test_a_prompt_that_fills_the_gpu_once_has_the_processors_to_itself() -> None:
    """Decodes beside it, which have a launch of their own, do not count."""
    for decodes in (0, 62):
        launch = scheduled([(1500, 3000), (700, 700), *[(1, 900)] * decodes])[-1]
        assert launch.num_splits == 1
        assert launch.tile == TILES["long"]


def test_options_of_a_tile() -> None:
    assert TILES["full"].options == {"num_warps": 8, "num_stages": 2, "maxnreg": 128}
    assert TILES["long"].options == {"num_warps": 8, "num_stages": 3}


@pytest.mark.parametrize(("group_size", "programs", "block_m"), [(1, 1, 16), (7, 1, 16), (17, 1, 32), (71, 2, 64)])
def test_a_tile_grows_to_hold_the_heads_of_a_group(group_size: int, programs: int, block_m: int) -> None:
    layer = replace(LAYER, num_kv_heads=1, group_size=group_size)
    (launch,) = scheduled([(1, 100)], layer)
    assert (launch.num_programs, launch.block_m) == (programs, block_m)
    assert launch.group * programs >= group_size
    assert launch.block_q * launch.group <= block_m


def test_the_workspace_of_splits_is_bounded() -> None:
    rows = [(1, 200_000)] * 4 + [(1, 16)] * 4000
    (launch,) = scheduled(rows, device=replace(H200, num_processors=100_000))
    floats = launch.num_parts * launch.num_programs * launch.block_m * 129
    assert floats * 4 <= 128 * 2**20
    assert launch.num_items or launch.num_splits * launch.least_span >= 200_000


@pytest.mark.parametrize("shared_memory", [232448, 166912, 101376])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_size", [16, 32, 64, 128, 256])
def test_tiles_fit_the_shared_memory_of_common_gpus(head_size: int, itemsize: int, shared_memory: int) -> None:
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0)):
        for query_class in TILES:
            tile = tile_for(head_size, query_class, itemsize, Device(132, shared_memory, capability))
            rows = tile.block_m + 2 * tile.block_n * tile.num_stages
            assert rows * head_size * itemsize <= shared_memory
            assert tile.block_n >= 16
