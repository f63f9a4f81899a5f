"""The run time of compiled kernels: the cache on disk, and the processors that it works on."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmkit.hookspecs import Environment
from llmkit.jit import runtime
from llmkit.jit import vector as ops
from llmkit.jit.support import kernel_problems


def _double(args: Any) -> None:
    size = 4 * ops.LANES
    while True:
        row = ops.take(args, 0)
        if row >= args[3]:
            break
        value = ops.vload(args[1] + size * row)
        ops.vstore(args[2] + size * row, ops.vadd(value, value))


def check(compile_kernel: Callable[[Callable[..., None]], Any]) -> None:
    kernel = compile_kernel(_double)
    source = torch.randn(5, ops.LANES)
    for threads in (1, 2):
        target = torch.empty_like(source)
        runtime.launch(kernel, threads, source.data_ptr(), target.data_ptr(), 5)
        assert torch.equal(target, 2 * source)


def test_kernels_are_kept_in_llmkits_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    before = numba.config.CACHE_DIR
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("LLMKIT_CACHE", str(tmp_path))
    check(runtime.compile_kernel)
    kept = list((tmp_path / "kernels").rglob("*.nbi"))
    assert len(kept) == 1
    assert before == numba.config.CACHE_DIR
    check(runtime.compile_kernel)
    assert list((tmp_path / "kernels").rglob("*.nbi")) == kept
    kept[0].write_bytes(b"")  # a damaged file is no reason to fail
    check(runtime.compile_kernel)


def test_numbas_own_cache_folder_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    monkeypatch.setenv("LLMKIT_CACHE", str(tmp_path / "llmkit"))
    check(runtime.compile_kernel)
    assert list((tmp_path / "numba").rglob("*.nbi"))
    assert not (tmp_path / "llmkit").exists()


def test_a_helper_that_changes_makes_new_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("LLMKIT_CACHE", str(tmp_path))
    helper = types.ModuleType("helper")
    helper.__file__ = str(tmp_path / "helper.py")
    for text in ("a = 1", "a = 2"):
        (tmp_path / "helper.py").write_text(text)
        check(lambda function: runtime.compile_kernel(function, (helper,)))
    assert len(list((tmp_path / "kernels").iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LLMKIT_CACHE", str(tmp_path / "file"))
    check(runtime.compile_kernel)


def test_problems_of_machines() -> None:
    modern = frozenset({"sse2", "avx2", "f16c", "fma"})
    assert kernel_problems(Environment(machine="x86_64", cpu_flags=modern)) == []
    assert kernel_problems(Environment(machine="aarch64", cpu_flags=frozenset({"asimd"}))) == []
    assert kernel_problems(Environment(machine="x86_64", cpu_flags=frozenset())) == []  # the platform does not tell
    old = Environment(device_type="cuda", machine="x86_64", cpu_flags=frozenset({"sse2", "fma"}))
    assert kernel_problems(old) == [
        "needs the CPU; the device is cuda",
        "needs a processor with avx2, f16c",
    ]
