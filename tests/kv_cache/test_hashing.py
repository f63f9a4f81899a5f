from __future__ import annotations

import itertools
import random
import subprocess
import sys
from hashlib import blake2b

import pytest

from llmkit.kv_cache import hashing
from llmkit.kv_cache.hashing import HASH_BYTES, BlockHasher, ExtraKey

HASHER = BlockHasher(16)


def hashes(token_ids, cache_salt=None, extra_keys=(), hasher=HASHER):
    chain = hasher.chain(cache_salt, extra_keys)
    chain.extend(token_ids, len(token_ids) // hasher.block_size)
    return chain.hashes


def test_b34_shifted_and_swapped_blocks_are_distinct():
    base = [100 * (i + 1) for i in range(16)]
    blocks = {tuple(base)}
    for base_of_a_polynomial in (31, 2**16 - 1):  # one up, the next down by the base: equal sums in such a hash
        for up, down in ((1, base_of_a_polynomial), (base_of_a_polynomial, 1)):
            blocks.add((base[0] + up, max(0, base[1] - down), *base[2:]))
    for shift in (1, 31, 2**16 - 1):
        for step in (-1, 1, 30, 31, 99, 101):
            for i in range(15):
                shifted = base.copy()
                shifted[i] += shift
                shifted[i + 1] = max(0, shifted[i + 1] - shift * step)
                blocks.add(tuple(shifted))
    for i, j in itertools.combinations(range(16), 2):
        swapped = base.copy()
        swapped[i], swapped[j] = swapped[j], swapped[i]
        blocks.add(tuple(swapped))
    assert len({hashes(list(block))[0] for block in blocks}) == len(blocks)


def test_b34_random_blocks_are_distinct_and_wide():
    assert HASH_BYTES * 8 >= 128
    rng = random.Random(34)
    chain = HASHER.chain()
    chain.extend([rng.randrange(50_000) for _ in range(20_000 * 16)], 20_000)
    assert {len(block_hash) for block_hash in chain.hashes} == {HASH_BYTES}
    assert len(set(chain.hashes)) == 20_000
    assert len({block_hash[:8] for block_hash in chain.hashes}) == 20_000


def test_b34_same_block_behind_another_parent():
    same = list(range(16))
    assert hashes([1] * 16 + same)[1] != hashes([2] * 16 + same)[1]
    assert hashes(same + same)[1] != hashes(same)[0]


def test_b34_equal_across_processes():
    program = (
        "from llmkit.kv_cache.hashing import *\n"
        "chain = BlockHasher(16, b'model').chain('salt', [ExtraKey('lora', 'a'), ExtraKey('media', b'm', (3, 20))])\n"
        "chain.extend(list(range(64)), 4)\n"
        "print(*(h.hex() for h in chain.hashes))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    keys = [ExtraKey("lora", "a"), ExtraKey("media", b"m", (3, 20))]
    here = hashes(list(range(64)), "salt", keys, BlockHasher(16, b"model"))
    assert outputs == {" ".join(block_hash.hex() for block_hash in here) + "\n"}


def test_the_format_does_not_change_by_accident():
    """Hashes may be on disk; a change of the format must change its version, and then this test."""
    assert hashes(list(range(16)))[0].hex()[:32] == "8fcabf853e6bfab2f8f03ce734563329"


def test_block_size_and_namespace_are_part_of_the_hash():
    tokens = [7] * 32
    first = {
        hashes(tokens, hasher=hasher)[0]
        for hasher in (BlockHasher(16), BlockHasher(8), BlockHasher(32), BlockHasher(16, b"other model"))
    }
    assert len(first) == 4


def test_tagged_keys_never_mix():
    tokens = list(range(32))
    variants = [
        (None, ()),
        ("", ()),
        ("a", ()),
        (None, (ExtraKey("lora", "a"),)),
        (None, (ExtraKey("media", "a"),)),
        (None, (ExtraKey("lora", b"a"),)),
        (None, (ExtraKey("lora", "1"),)),
        (None, (ExtraKey("lora", 1),)),
        (None, (ExtraKey("lor", "aa"),)),
        (None, (ExtraKey("lora", "a"), ExtraKey("media", "b"))),
        (None, (ExtraKey("lora", "b"), ExtraKey("media", "a"))),
        ("a", (ExtraKey("lora", "a"),)),
        (None, (ExtraKey("media", "a", (0, 8)),)),
        (None, (ExtraKey("media", "a", (1, 8)),)),
        (None, (ExtraKey("media", "a", (0, 9)),)),
        (None, (ExtraKey("media", "b", (0, 8)),)),
        (None, (ExtraKey("media", "a", (0, 4)), ExtraKey("media", "a", (4, 8)))),
    ]
    chains = [hashes(tokens, salt, keys) for salt, keys in variants]
    assert len({chain[0] for chain in chains}) == len(variants)
    assert len({chain[1] for chain in chains}) == len(variants)


def test_order_of_keys_does_not_matter():
    a, b = ExtraKey("lora", "x"), ExtraKey("media", "y", (2, 3))
    assert hashes([1] * 16, extra_keys=(a, b)) == hashes([1] * 16, extra_keys=(b, a))


def test_media_counts_from_its_block_on():
    plain, media = hashes([5] * 64), hashes([5] * 64, extra_keys=(ExtraKey("media", "m", (20, 40)),))
    assert [a == b for a, b in zip(plain, media, strict=True)] == [True, False, False, False]


def test_chain_is_extended_without_hashing_again():
    tokens = list(range(100, 180))
    chain = HASHER.chain()
    for blocks in (0, 1, 1, 3, 5):
        chain.extend(tokens, blocks)
        assert len(chain.hashes) == blocks
    assert chain.hashes == hashes(tokens)
    fork = chain.fork(2)
    fork.extend(tokens[:32] + [0] * 16, 3)
    assert fork.hashes[:2] == chain.hashes[:2]
    assert fork.hashes[2] != chain.hashes[2]
    assert len(chain.hashes) == 5


def test_unfilled_blocks_and_placeholders_are_refused():
    chain = HASHER.chain()
    with pytest.raises(ValueError, match="block 1 is not full: only 31 tokens"):
        chain.extend([1] * 31, 2)
    for bad in (-1, 2**32, "x"):
        with pytest.raises(ValueError, match="token ids must be integers"):
            chain.extend([1] * 15 + [bad], 1)
    assert chain.hashes == []


def test_block_size_is_checked():
    with pytest.raises(ValueError, match="block_size"):
        BlockHasher(0)


def test_sequences_that_begin_alike_have_the_hashes_they_have_alone():
    rng = random.Random(7)
    hasher, tokens = BlockHasher(4), list(range(40))
    chains = []
    for _ in range(200):
        tokens = tokens[: rng.randrange(41)] + [rng.randrange(9) for _ in range(rng.randrange(40))]
        salt = rng.choice([None, None, None, "other"])
        chain = hasher.chain(salt)
        chain.extend(tokens, rng.randrange(len(tokens) // 4 + 1))
        chains.append((chain, list(tokens), salt))
        some, of_some, _ = rng.choice(chains)  # grows on while others are hashed
        some.extend(of_some, len(of_some) // 4)
    for chain, of_chain, salt in chains:
        assert chain.hashes == hashes(of_chain, salt, hasher=BlockHasher(4))[: len(chain.hashes)]


def test_an_interrupt_leaves_no_hashes_beside_the_tokens_of_another():
    """At every operation of the code that hashes."""
    first, second = list(range(40)), list(range(100, 140))
    expected = hashes(second, hasher=BlockHasher(4))

    def struck_at(operation):
        def trace(frame, event, _):
            nonlocal seen
            frame.f_trace_opcodes = True
            if event == "opcode" and frame.f_code.co_filename == hashing.__file__:
                seen += 1
                if seen == operation:
                    raise KeyboardInterrupt
            return trace

        seen, hasher = 0, BlockHasher(4)
        hashes(first, hasher=hasher)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            hashes(second, hasher=hasher)
        except KeyboardInterrupt:
            return hasher
        finally:
            sys.settrace(before)
        return None

    operation = 1
    while (hasher := struck_at(operation)) is not None:
        assert hashes(second, hasher=hasher) == expected
        operation += 1
    assert operation > 100


def test_blocks_that_the_sequence_before_had_are_not_hashed_again(monkeypatch):
    hashed = []

    def counted(message, **options):
        hashed.append(message)
        return blake2b(message, **options)

    hasher, first = BlockHasher(4), list(range(40))
    expected = hashes([*first[:36], 7, 7, 7, 7], hasher=BlockHasher(4))
    monkeypatch.setattr("llmkit.kv_cache.hashing.blake2b", counted)
    hashes(first, hasher=hasher)
    assert len(hashed) == 10
    assert hashes([*first[:36], 7, 7, 7, 7], hasher=hasher) == expected
    assert len(hashed) == 11
    hashes(first, "salt", hasher=hasher)
    assert len(hashed) == 11 + 1 + 10, "another seed"
