"""What is noted of kernels that were compiled before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmkit.jit import known, runtime


@pytest.fixture
def source(tmp_path, monkeypatch):
    """The file of the only kernel that this process has compiled; the cache is empty."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("LLMKIT_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "kernel.py"
    file.write_text("a = 1")
    monkeypatch.setattr(runtime, "_sources", {str(file)})
    return file


@pytest.mark.usefixtures("source")
def test_what_was_remembered_is_known_to_those_who_use_it() -> None:
    assert not known.is_known("cpu float32")
    known.remember("cpu float32")
    assert known.is_known("cpu float32")
    assert not known.is_known("cpu bfloat16")


def test_other_code_is_not_known(source: Path) -> None:
    known.remember("cpu")
    stat = source.stat()
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert not known.is_known("cpu")
    known.remember("cpu")
    source.unlink()
    assert not known.is_known("cpu")


@pytest.mark.usefixtures("source")
def test_another_version_of_numba_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    known.remember("cpu")
    monkeypatch.setattr("numba.__version__", "0")
    assert not known.is_known("cpu")


@pytest.mark.parametrize("text", ["", "[]", '{"files": 3}', '{"files": {"x": 1}}', "{}"])
@pytest.mark.usefixtures("source")
def test_a_damaged_note_is_none(tmp_path: Path, text: str) -> None:
    known.remember("cpu")
    (note,) = (tmp_path / "cache").rglob("*.known")
    note.write_text(text)
    assert not known.is_known("cpu")


def test_without_a_cache_nothing_is_known(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMKIT_CACHE", str(source))
    known.remember("cpu")
    assert not known.is_known("cpu")
