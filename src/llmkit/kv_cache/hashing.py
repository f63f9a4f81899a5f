"""Content hashes of full blocks: a chain in which every hash stands for all tokens up to the end of its
block.

    root      = H(format version, block size, namespace)
    parent[0] = root, or H(root, tagged keys of the whole sequence: cache salt, LoRA, ...)
    hash[i]   = H(parent[i], token ids of block i as uint32, tagged keys that lie in block i: media, ...)

H is BLAKE2b with 256 bits, so equal hashes mean equal content: nobody finds a collision by shifting ids
about, and no token comparison is needed behind the index. Nothing depends on the process (no random seed),
the byte order or Python's `hash`, so the same content has the same hash in every process and on every
machine.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

HASH_BYTES = 32
"""Bytes of a block hash."""

_FORMAT = b"llmkit.kv.1"
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class ExtraKey:
    """Something besides the token ids that the cached keys and values depend on.

    tag: what kind of thing it is ("lora", "media", ...); part of the hash, so that two kinds never mix.
    value: its identity; text, bytes and integers are told apart.
    span: token positions [start, end) that it covers, for media placed in a sequence; None: the whole
    sequence.
    """

    tag: str
    value: str | bytes | int
    span: tuple[int, int] | None = None

    def encode(self) -> bytes:
        """Bytes that no other key has: every part carries its type and length."""
        if isinstance(self.value, str):
            kind, value = b"s", self.value.encode("utf-8", "surrogatepass")
        elif isinstance(self.value, bytes):
            kind, value = b"b", self.value
        else:
            kind, value = b"i", str(int(self.value)).encode()
        span = b"" if self.span is None else f"{self.span[0]}:{self.span[1]}".encode()
        return _framed(self.tag.encode("utf-8", "surrogatepass")) + kind + _framed(value) + _framed(span)


def _framed(part: bytes) -> bytes:
    return len(part).to_bytes(8, "little") + part


def _digest(*parts: bytes) -> bytes:
    return blake2b(b"".join(parts), digest_size=HASH_BYTES).digest()


class BlockHasher:
    """Hashes the full blocks of sequences.

    block_size: tokens per block, >= 1. namespace: whatever else makes caches incomparable (model, dtype) when
    the hashes leave the process, for example to a shared disk tier.
    """

    def __init__(self, block_size: int, namespace: bytes = b"") -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.root = _digest(_framed(_FORMAT), block_size.to_bytes(8, "little"), _framed(namespace))
        self._last = _LastHashed()

    def chain(self, cache_salt: str | None = None, extra_keys: Sequence[ExtraKey] = ()) -> HashChain:
        """An empty chain for a sequence with this salt and these keys (their order does not matter)."""
        encoded = sorted(key.encode() for key in extra_keys if key.span is None)
        if cache_salt is not None:
            encoded.append(ExtraKey("cache_salt", cache_salt).encode())
        seed = _digest(self.root, *encoded) if encoded else self.root
        local = tuple(sorted((key.span[0], key.span[1], key.encode()) for key in extra_keys if key.span is not None))
        return HashChain(self.block_size, seed, local, self._last)


def block_hashes(
    token_ids: Sequence[int],
    block_size: int,
    *,
    cache_salt: str | None = None,
    extra_keys: Sequence[ExtraKey] = (),
) -> list[bytes]:
    """Content hashes of all full blocks of a sequence, as the prefix cache, its events and connectors use them.

    Raises ValueError for a token that is not an unsigned 32-bit integer.
    """
    chain = BlockHasher(block_size).chain(cache_salt, extra_keys)
    chain.extend(token_ids, len(token_ids) // block_size)
    return chain.hashes


class _LastHashed:
    """The sequence whose beginning was hashed last: prompts that begin alike come one after the other, and comparing
    their tokens takes a hundredth of hashing them."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        # One value: an interrupt must not leave the hashes of one sequence beside the tokens of another.
        self._known: tuple[bytes, bytes, list[bytes]] = b"", b"", []

    def common(self, seed: bytes, data: bytes, step: int) -> list[bytes]:
        """The hashes of as many blocks of `step` bytes as `data` has in common with that sequence from the start."""
        known_seed, known, hashes = self._known
        if seed != known_seed:
            return []
        same, most = 0, min(len(data), len(known)) // step
        while same < most:
            middle = (same + most + 1) // 2
            if data[same * step : middle * step] == known[same * step : middle * step]:
                same = middle
            else:
                most = middle - 1
        return hashes[:same]

    def keep(self, seed: bytes, data: bytes, hashes: list[bytes]) -> None:
        """hashes: of `data`; more may be appended."""
        self._known = seed, data, hashes


class HashChain:
    """Hashes of the full blocks of one sequence, extended as the sequence grows, never computed twice.

    hashes: hash of block 0, 1, ... as far as `extend` was asked. seed: the parent of block 0.
    """

    __slots__ = ("_last", "_local_keys", "block_size", "hashes", "seed")

    def __init__(
        self, block_size: int, seed: bytes, local_keys: tuple[tuple[int, int, bytes], ...], last: _LastHashed
    ) -> None:
        self.block_size = block_size
        self.seed = seed
        self.hashes: list[bytes] = []
        self._local_keys = local_keys
        self._last = last

    def extend(self, token_ids: Sequence[int], num_blocks: int) -> None:
        """Hash up to block `num_blocks` - 1; `token_ids` is the whole sequence.

        About 1 µs per block of 16 tokens, next to nothing for blocks that the sequence hashed before this one begins
        with, too. Raises ValueError if a token of these blocks is missing or is not
        an unsigned 32-bit integer.
        """
        hashes, size = self.hashes, self.block_size
        first = len(hashes)
        if num_blocks <= first:
            return
        if num_blocks * size > len(token_ids):
            raise ValueError(f"block {num_blocks - 1} is not full: only {len(token_ids)} tokens are known")
        data = _token_bytes(token_ids[first * size : num_blocks * size])
        step = size * _TOKEN_BYTES
        local = self._local_keys
        begins = not first and not local
        if begins:
            hashes += self._last.common(self.seed, data, step)
        parent = hashes[-1] if hashes else self.seed
        for i in range(len(hashes) - first, num_blocks - first):
            message = parent + data[i * step : (i + 1) * step]
            if local:
                message += self._keys_in_block(first + i)
            parent = blake2b(message, digest_size=HASH_BYTES).digest()
            hashes.append(parent)
        if begins:
            self._last.keep(self.seed, data, hashes)

    def fork(self, num_blocks: int) -> HashChain:
        """A chain of its own that starts with the first `num_blocks` hashes of this one."""
        child = HashChain(self.block_size, self.seed, self._local_keys, self._last)
        child.hashes = self.hashes[:num_blocks]
        return child

    def _keys_in_block(self, block: int) -> bytes:
        start, end = block * self.block_size, (block + 1) * self.block_size
        return b"".join(key for first, last, key in self._local_keys if first < end and last > start)


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    try:
        tokens = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers from 0 to 2**32 - 1: {error}") from error
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()
