"""Which requests the engine process is computing or taking in, written where it outlives the process: when one is
killed in the middle of a step, its parent reads here who was part of it."""

from __future__ import annotations

import os
import struct
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from llmkit.requests.request import Request

_HEADER = struct.Struct("<QII")
"""Number of the record, bytes of its data, their CRC-32."""

_REGION_BYTES = 64 << 20
"""Distance of the two places that records are written to by turns; the file is sparse."""


def new_record_file() -> int:
    """A descriptor of a new file without a name, which nothing can leave behind."""
    with tempfile.TemporaryFile(prefix="llmkit-") as file:
        return os.dup(file.fileno())


class PlanRecorder:
    """The writing end, in the engine process. Costs nothing while the same requests go on."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._number = 0
        self._last: Sequence[Request] = ()
        self._before: Sequence[Request] = ()
        self._taken_in = False

    def note(self, requests: Sequence[Request]) -> None:
        """A step with `requests` is about to run; the one before it may still be running."""
        if requests == self._last == self._before and not self._taken_in:
            return
        self._before, self._last, self._taken_in = self._last, list(requests), False
        self._write({request.request_id for request in (*self._before, *self._last)})

    def take_in(self, request_ids: Sequence[str]) -> None:
        """These requests are about to be taken in; steps may still be running."""
        if request_ids:
            self._taken_in = True
            self._write({*request_ids, *(request.request_id for request in (*self._before, *self._last))})

    def clear(self) -> None:
        """No step is running."""
        if self._last or self._before or self._taken_in:
            self._last, self._before, self._taken_in = (), (), False
            self._write(())

    def _write(self, request_ids: Iterable[str]) -> None:
        data = msgspec.msgpack.encode(list(request_ids))
        self._number += 1
        header = _HEADER.pack(self._number, len(data), zlib.crc32(data))
        os.pwrite(self._fd, header + data, self._number % 2 * _REGION_BYTES)


def read_record(fd: int) -> list[str]:
    """Ids of the requests of the last record; one that was broken off while it was written does not count."""
    best: tuple[int, list[str]] = (0, [])
    for region in range(2):
        offset = region * _REGION_BYTES
        header = os.pread(fd, _HEADER.size, offset)
        if len(header) < _HEADER.size:
            continue
        number, size, checksum = _HEADER.unpack(header)
        data = os.pread(fd, size, offset + _HEADER.size)
        if number > best[0] and len(data) == size and zlib.crc32(data) == checksum:
            best = (number, msgspec.msgpack.decode(data, type=list[str]))
    return best[1]
