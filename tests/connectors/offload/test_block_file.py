from __future__ import annotations

import random

import pytest

from llmkit_connectors.offload.block_file import DamagedBlock, check, header_bytes, make_header

SPACE, HASH = b"s" * 32, b"h" * 32


@pytest.mark.parametrize("size", [0, 1, 1000, 1 << 18, (1 << 18) + 1, 700_000])
def test_a_block_comes_back(size: int):
    payload = memoryview(random.Random(size).randbytes(size))
    header = make_header(SPACE, HASH, payload)
    assert len(header) == header_bytes(size)
    check(memoryview(header), payload, SPACE, HASH)


def test_every_flipped_bit_is_noticed():
    payload = random.Random(1).randbytes(300)
    header = make_header(SPACE, HASH, memoryview(payload))
    whole = header + payload
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedBlock):
            check(memoryview(damaged)[: len(header)], memoryview(damaged)[len(header) :], SPACE, HASH)


@pytest.mark.parametrize(("space", "content_hash", "size"), [(b"S" * 32, HASH, 300), (SPACE, b"H" * 32, 300)])
def test_another_block_is_not_taken_for_this_one(space: bytes, content_hash: bytes, size: int):
    payload = memoryview(bytes(size))
    header = make_header(space, content_hash, payload)
    with pytest.raises(DamagedBlock, match="another block"):
        check(memoryview(header), payload, SPACE, HASH)


def test_payloads_of_the_same_number_of_chunks_but_another_size_differ():
    header = make_header(SPACE, HASH, memoryview(bytes(300)))
    with pytest.raises(DamagedBlock, match="another block"):
        check(memoryview(header), memoryview(bytes(301)), SPACE, HASH)


def test_zeros_are_no_block():
    with pytest.raises(DamagedBlock):
        check(memoryview(bytes(header_bytes(300))), memoryview(bytes(300)), SPACE, HASH)
