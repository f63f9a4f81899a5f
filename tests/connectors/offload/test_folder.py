from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmkit_connectors.offload.folder import Folder
from llmkit_connectors.offload.media import open_medium


def everything_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_paths_and_file_urls_mean_the_same(tmp_path: Path):
    open_medium(str(tmp_path), {}).write("a/b", [b"12", memoryview(b"345")])
    medium = open_medium(f"file://{tmp_path}", {})
    first, second = bytearray(2), bytearray(3)
    assert medium.read_into("a/b", [memoryview(first), memoryview(second)]) == 5
    assert (bytes(first), bytes(second)) == (b"12", b"345")
    assert [(file.name, file.size) for file in medium.files()] == [("a/b", 5)]
    assert everything_in(tmp_path) == ["llmkit-kv/a/b"]
    assert medium.exists("a/b")
    medium.remove("a/b")
    medium.remove("a/b")
    assert not medium.exists("a/b")
    with pytest.raises(FileNotFoundError):
        medium.read_into("a/b", [memoryview(first)])


@pytest.mark.parametrize("size", [0, 1, 4, 6, 100])
def test_a_file_of_the_wrong_size_is_told_by_its_size(tmp_path: Path, size: int):
    folder = Folder(str(tmp_path))
    folder.write("x", [bytes(size)])
    assert folder.read_into("x", [memoryview(bytearray(2)), memoryview(bytearray(3))]) == size


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path):
    folder = Folder(str(tmp_path / "nothing"))
    assert list(folder.files()) == []
    folder.sweep()
    assert not (tmp_path / "nothing").exists()


def test_what_fails_halfway_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = Folder(str(tmp_path))
    folder.write("x", [b"old"])
    real_write, calls = os.write, []

    def write(descriptor: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(descriptor, data[:2])

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space left"):
        folder.write("x", [b"new content"])
    monkeypatch.undo()
    assert everything_in(tmp_path) == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"


def test_a_limit_of_the_system_on_file_sizes_is_an_error_of_that_file_only(tmp_path: Path):
    folder = Folder(str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            folder.write("large", [bytes(2000)])
        folder.write("small", [bytes(100)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert everything_in(tmp_path) == ["small"]


KILLED_WRITER = """
import os, sys
from llmkit_connectors.offload.folder import Folder
real_write = os.write
def write(descriptor, data):
    real_write(descriptor, data[:10])
    os.kill(os.getpid(), 9)
os.write = write
Folder(sys.argv[1]).write("a/block", [bytes(100)])
"""


def test_what_a_killed_writer_left_is_swept_and_never_seen(tmp_path: Path):
    killed = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(tmp_path)], check=False)
    assert killed.returncode == -9
    assert len(everything_in(tmp_path)) == 1
    folder = Folder(str(tmp_path))
    assert list(folder.files()) == []
    folder.sweep()
    assert everything_in(tmp_path) == []


def test_sweeping_spares_writers_that_live(tmp_path: Path):
    folder = Folder(str(tmp_path))
    host = folder._host
    mine = tmp_path / f".tmp-{host}-{os.getpid()}-0"
    elsewhere = tmp_path / ".tmp-00000000-1-0"
    abandoned = tmp_path / ".tmp-00000000-2-0"
    for path in (mine, elsewhere, abandoned, tmp_path / ".hidden"):
        path.write_bytes(b"x")
    os.utime(abandoned, (0, time.time() - 4000))
    folder.sweep()
    assert everything_in(tmp_path) == sorted([".hidden", mine.name, elsewhere.name])


def test_use_is_noted(tmp_path: Path):
    folder = Folder(str(tmp_path))
    folder.write("x", [b"1"])
    os.utime(tmp_path / "x", (5, 5))
    assert [file.modified for file in folder.files()] == [5]
    folder.touch("x")
    assert next(file.modified for file in folder.files()) > 1e9
