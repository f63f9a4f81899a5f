"""The bytes of a stored block: a header that says whose block it is, and the payload.

    magic, version, reserved, chunk size, payload size      8s H H I Q, little-endian
    fingerprint, content hash                               32 bytes each
    CRC-32 of every chunk of the payload                    I each
    CRC-32 of the header so far                             I
    payload

A reader knows all of it but the checksums beforehand, so whatever differs makes the block damaged. A checksum for
every 256 KiB instead of one for all keeps each over so few bytes that small damage cannot go unseen. CRC-32 is the
fastest check of the standard library by far (several GB/s); it guards against accidents, not against people who can
write to the storage.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

VERSION = 1

_MAGIC = b"llmkitKV"
_FIXED = struct.Struct("<8sHHIQ32s32s")
_CHUNK_BYTES = 1 << 18
_CHECKSUM = struct.Struct("<I")


class DamagedBlock(Exception):
    """A stored block is not what it should be; the message says in what respect."""


def header_bytes(payload_bytes: int) -> int:
    """Size of the header in front of a payload of `payload_bytes`."""
    return _FIXED.size + _CHECKSUM.size * (_num_chunks(payload_bytes) + 1)


def make_header(fingerprint: bytes, content_hash: bytes, payload: memoryview) -> bytes:
    """The header for `payload` (bytes, contiguous), the block `content_hash` of the cache `fingerprint`, 32 bytes
    each."""
    header = _FIXED.pack(_MAGIC, VERSION, 0, _CHUNK_BYTES, payload.nbytes, fingerprint, content_hash)
    header += b"".join(_CHECKSUM.pack(zlib.crc32(chunk)) for chunk in _chunks(payload))
    return header + _CHECKSUM.pack(zlib.crc32(header))


def check(header: memoryview, payload: memoryview, fingerprint: bytes, content_hash: bytes) -> None:
    """Raises DamagedBlock unless `header`, as it was read, is that of `payload` and of this block."""
    body, checksum = header[: -_CHECKSUM.size], header[-_CHECKSUM.size :]
    if zlib.crc32(body) != _CHECKSUM.unpack(checksum)[0]:
        raise DamagedBlock("its header is damaged")
    found = _FIXED.unpack_from(body)
    if found != (_MAGIC, VERSION, 0, _CHUNK_BYTES, payload.nbytes, fingerprint, content_hash):
        raise DamagedBlock("it is another block, or of another version")
    checksums = _CHECKSUM.iter_unpack(body[_FIXED.size :])
    for number, (chunk, (expected,)) in enumerate(zip(_chunks(payload), checksums, strict=True)):
        if zlib.crc32(chunk) != expected:
            raise DamagedBlock(f"its bytes from {number * _CHUNK_BYTES} on are damaged")


def _num_chunks(payload_bytes: int) -> int:
    return -(-payload_bytes // _CHUNK_BYTES)


def _chunks(payload: memoryview) -> Iterator[memoryview]:
    for start in range(0, payload.nbytes, _CHUNK_BYTES):
        yield payload[start : start + _CHUNK_BYTES]
