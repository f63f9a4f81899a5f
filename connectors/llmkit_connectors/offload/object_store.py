"""Anything that fsspec knows as a medium: S3 and its like, memory, remote file systems."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from llmkit_connectors.offload.media import Medium, StoredFile

_TIMES = ("LastModified", "mtime", "modified", "last_modified", "updated", "created")


class ObjectStore(Medium):
    """Objects are written whole by one call and read whole by one call.

    No listing is remembered, because other processes change the store too.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        import fsspec

        options = {"use_listings_cache": False, **storage_options}
        self._files, root = fsspec.url_to_fs(url, **options)
        self._root = str(root).rstrip("/")
        self.url = url

    def files(self) -> Iterator[StoredFile]:
        try:
            found = self._files.find(self._root, detail=True)
        except FileNotFoundError:
            return
        for path, info in found.items():
            name = path[len(self._root) :].lstrip("/")
            yield StoredFile(name, int(info.get("size") or 0), _modified(info))

    def exists(self, name: str) -> bool:
        return bool(self._files.exists(self._path(name)))

    def exist(self, names: Sequence[str]) -> list[bool]:
        if not self._files.async_impl:
            return super().exist(names)
        from fsspec.asyn import sync

        async def ask() -> list[bool]:
            return list(await asyncio.gather(*(self._files._exists(self._path(name)) for name in names)))

        found: list[bool] = sync(self._files.loop, ask)
        return found

    def read_into(self, name: str, parts: Sequence[memoryview]) -> int:
        data = self._files.cat_file(self._path(name))
        stream = io.BytesIO(data)
        for part in parts:
            stream.readinto(part)
        return len(data)

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        self._files.pipe_file(self._path(name), b"".join(parts))

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def _modified(info: Mapping[str, Any]) -> float:
    """When the file was written, in seconds since the epoch, in whatever way its file system says so; 0 if it does
    not."""
    for key in _TIMES:
        value = info.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0
