"""Where the files of the file tier lie: a folder of this machine, or anything that fsspec knows.

The same few operations for both. A folder has its own class because only there files can be renamed into place, read
into memory that is there already, and be given a new time of use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file as a listing shows it. name: relative to the medium's root, with "/". modified: seconds since the
    epoch."""

    name: str
    size: int
    modified: float


class Medium(ABC):
    """Named byte strings that are written once. All methods may be called from several threads and raise whatever the
    storage raises; FileNotFoundError for a name that is not there."""

    url: str
    """What the user calls it."""

    @abstractmethod
    def files(self) -> Iterator[StoredFile]:
        """Everything there is, in no order. What another process adds or removes meanwhile may be missed."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether `name` is there now."""

    def exist(self, names: Sequence[str]) -> list[bool]:
        """`exists` for several names; at once, if the medium can ask so."""
        return [self.exists(name) for name in names]

    @abstractmethod
    def read_into(self, name: str, parts: Sequence[memoryview]) -> int:
        """Fill `parts`, one after another, from the start of the file; the file's size, which may be smaller (then
        the rest keeps what it held) or larger."""

    @abstractmethod
    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Create or replace a file of these parts. Others see all of it or nothing; if it raises, nothing stays
        behind."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file; nothing happens if there is none."""

    def touch(self, name: str) -> None:  # noqa: ARG002
        """The file was used, if the medium can note that."""
        return

    def sweep(self) -> None:
        """Remove what writers that died have left behind, if the medium lets them leave anything."""
        return


FOLDER = "llmkit-kv"
"""Everything lies below this folder of a url, so that nobody else's files are ever listed."""


def open_medium(url: str, storage_options: Mapping[str, Any]) -> Medium:
    """The medium in the folder `FOLDER` of `url`: a path, or a URL of a scheme that fsspec knows. Touches no storage
    yet.

    storage_options: for fsspec, unused for a folder. Raises ImportError if the scheme's library is missing,
    ValueError for an unknown scheme.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme in ("file", "local"):
        from llmkit_connectors.offload.folder import Folder

        return Folder(str(Path(rest if separator else url) / FOLDER))
    from llmkit_connectors.offload.object_store import ObjectStore

    return ObjectStore(f"{scheme}://{rest.rstrip('/')}/{FOLDER}", storage_options)
