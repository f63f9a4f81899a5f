"""A folder of this machine (also a mounted network share) as a medium."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from llmkit_connectors.offload.media import Medium, StoredFile

_TEMPORARY = re.compile(r"^\.tmp-([0-9a-f]{8})-(\d+)-\d+$")
_STALE_S = 3600.0  # a writer of another machine that has not finished a file by then is gone

_numbers = itertools.count()


class Folder(Medium):
    """Files appear by renaming, so no reader sees half of one. They are not forced to the disk: what a power failure
    leaves of a file is for its checksums to find.

    A writer that is killed leaves a temporary file; its name says which process of which machine it was, and `sweep`
    removes it once that is gone.
    """

    def __init__(self, path: str) -> None:
        self._root = Path(path).expanduser().absolute()
        self.url = str(self._root)
        self._host = blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()

    def files(self) -> Iterator[StoredFile]:
        for entry in _entries(str(self._root)):
            if not entry.name.startswith("."):
                with contextlib.suppress(FileNotFoundError):  # removed by another process
                    info = entry.stat(follow_symlinks=False)
                    yield StoredFile(Path(entry.path).relative_to(self._root).as_posix(), info.st_size, info.st_mtime)

    def exists(self, name: str) -> bool:
        return os.path.exists(self._root / name)

    def read_into(self, name: str, parts: Sequence[memoryview]) -> int:
        with open(self._root / name, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            for part in parts:
                filled = 0
                while filled < part.nbytes:
                    count = file.readinto(part[filled:])
                    if not count:
                        return min(size, sum(p.nbytes for p in parts) - 1)
                    filled += count
        return size

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        path = self._root / name
        temporary = path.parent / f".tmp-{self._host}-{os.getpid()}-{next(_numbers)}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "xb", buffering=0) as file:
                for part in parts:
                    _write_all(file.fileno(), memoryview(part))
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._root / name)

    def touch(self, name: str) -> None:
        os.utime(self._root / name)

    def sweep(self) -> None:
        for entry in _entries(str(self._root)):
            match = _TEMPORARY.match(entry.name)
            if match is None:
                continue
            with contextlib.suppress(OSError):  # another process sweeps too, or it is not ours to remove
                mine = match[1] == self._host and _is_dead(int(match[2]))
                if mine or entry.stat().st_mtime < time.time() - _STALE_S:
                    os.unlink(entry.path)


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """The files below `folder`; a folder that is not there, that vanishes or that is not for us has none."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _entries(entry.path)
                else:
                    yield entry
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return


def _write_all(descriptor: int, data: memoryview) -> None:
    while data.nbytes:
        data = data[os.write(descriptor, data) :]


def _is_dead(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False
