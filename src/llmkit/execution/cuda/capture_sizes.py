"""For which batches a graph is captured. A step runs in the smallest graph of those there are that holds it."""

from __future__ import annotations

from bisect import bisect_left

LARGEST = 512  # rows; beyond, the device takes longer for a layer than the host

_COMMON = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448)

LEAST_WIDTH = 64  # pages
_WIDTH_STEP = 4


def capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of rows: 1, 2, 4, then steps of 8 to 256, then of 16, and the largest batch."""
    largest = min(max_num_seqs, LARGEST)
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, LARGEST + 1, 16)]
    return (*(size for size in sizes if size < largest), largest)


def common_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The sizes among `capture_sizes` that are captured at the start; any other is at most a half larger than one."""
    largest = min(max_num_seqs, LARGEST)
    return (*(size for size in _COMMON if size < largest), largest)


def padded_rows(rows: int, sizes: tuple[int, ...]) -> int | None:
    """The size that `rows` rows are padded to; None if there is none."""
    index = bisect_left(sizes, rows)
    return sizes[index] if index < len(sizes) else None


def padded_width(pages: int, most: int) -> int:
    """Columns of the block table, so that there are few different ones."""
    width = LEAST_WIDTH
    while width < pages:
        width *= _WIDTH_STEP
    return min(width, most)
