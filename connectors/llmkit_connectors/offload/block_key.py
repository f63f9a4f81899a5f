"""What a stored block is known by."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

_FORMAT = b"llmkit offload 1"  # another one when the order of bytes in a payload changes


class BlockKey(NamedTuple):
    """Content of one block: a KV group and the chained hash of all tokens up to the end of the block."""

    group: int
    content_hash: bytes


def space_of(fingerprint: str, rank: int, world_size: int, epoch: bytes = b"") -> bytes:
    """32 bytes for everything besides the tokens that the bytes of a block depend on: the engine's fingerprint
    (model, types, layout), and which part of the block worker `rank` of `world_size` has. Content of one space is
    never taken for that of another. epoch: something new once the engine has disowned all that was stored before.
    """
    text = b"|".join((_FORMAT, fingerprint.encode(), f"{rank}/{world_size}".encode(), epoch))
    return blake2b(text, digest_size=32).digest()
