"""In a rehearsal kernels are compiled, side by side and each once, and none is launched."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmkit.jit import rehearsal
from llmkit.jit.rehearsal import Rehearsal, launch

CPU = torch.device("cpu")


class Kernel:
    """As Triton's: `kernel[grid](...)` launches, `warmup` compiles."""

    arg_names = ("x_ptr", "count", "length")

    def __init__(self, do_not_specialize: tuple[str, ...] = ()) -> None:
        self.do_not_specialize = do_not_specialize
        self.launched: list[Any] = []
        self.compiled: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **options: Any) -> str:
            self.launched.append((grid, arguments, options))
            return "launched"

        return run

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> None:
        self.compiled.append((grid, arguments, options, threading.current_thread()))


def test_outside_it_a_launch_is_a_launch() -> None:
    kernel, x = Kernel(), torch.zeros(8)
    assert launch(kernel, (3,), x, 5, num_warps=2) == "launched"
    assert kernel.launched == [((3,), (x, 5), {"num_warps": 2})]
    assert not kernel.compiled


def test_inside_nothing_is_launched_and_each_kernel_is_compiled_once() -> None:
    kernel, x = Kernel(), torch.zeros(64)
    with Rehearsal(CPU) as entered:
        for _ in range(3):
            assert launch(kernel, (3,), x, 5, 7, num_warps=2) is None
        launch(kernel, (9,), x[16:], 6, 9, num_warps=2)  # as the first: alignment and divisibility are the same
        launch(kernel, (3,), x, 32, 7, num_warps=2)
        launch(kernel, (3,), x, 1, 7, num_warps=2)
        launch(kernel, (3,), x[1:], 5, 7, num_warps=2)
        launch(kernel, (3,), x.half(), 5, 7, num_warps=2)
        launch(kernel, (3,), x, 5, 7, num_warps=4)
        launch(kernel, (3,), x, 5, 7.0, num_warps=2)
        assert entered.num_kernels == 7
    assert len(kernel.compiled) == 7
    assert not kernel.launched
    assert all(thread is not threading.current_thread() for *_, thread in kernel.compiled)
    assert launch(kernel, (3,), x, 5) == "launched"


def test_arguments_that_kernels_are_not_specialised_for_make_no_difference() -> None:
    kernel, x = Kernel(("count",)), torch.zeros(8)
    with Rehearsal(CPU):
        for count in (1, 5, 16):
            launch(kernel, (1,), x, count, 3)
    assert len(kernel.compiled) == 1


def test_descriptors_are_told_apart_by_what_they_copy() -> None:
    kernel, x = Kernel(), torch.zeros(64)
    with Rehearsal(CPU):
        for base, block in ((x, [16, 64]), (x.clone(), [16, 64]), (x, [32, 64]), (x.half(), [16, 64])):
            launch(kernel, (1,), SimpleNamespace(base=base, block_shape=block))
    assert len(kernel.compiled) == 3


def test_kernels_are_compiled_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    met = threading.Barrier(2, timeout=30)

    class Waits(Kernel):
        def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> None:
            met.wait()
            super().warmup(*arguments, grid=grid, **options)

    kernel = Waits()
    with Rehearsal(CPU):
        launch(kernel, (1,), torch.zeros(8))
        launch(kernel, (1,), torch.zeros(8).half())
    assert len(kernel.compiled) == 2


def test_what_launches_a_kernel_is_built_with_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton would run the C compiler in the first launch. Where that fails, the launch tells."""
    triton = pytest.importorskip("triton")
    built: list[Any] = []

    class Driver:
        @staticmethod
        def launcher_cls(src: object, metadata: object) -> None:
            built.append((src, metadata, threading.current_thread()))
            if src == "bad":
                raise OSError("no compiler")

    class Compiled(Kernel):
        def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> Any:  # noqa: ARG002
            return SimpleNamespace(src=options["src"], metadata="m")

    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    kernel = Compiled()
    with caplog.at_level("DEBUG", "llmkit.execution"), Rehearsal(CPU):
        launch(kernel, (1,), torch.zeros(8), src="good")
        launch(kernel, (1,), torch.zeros(8), src="bad")
    assert {(src, metadata) for src, metadata, _ in built} == {("good", "m"), ("bad", "m")}
    assert all(thread is not threading.current_thread() for *_, thread in built)
    assert "no compiler" in caplog.text
    assert launch(kernel, (1,), torch.zeros(8)) == "launched"


def test_what_cannot_be_compiled_is_left_to_the_launch(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Kernel):
        def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> None:  # noqa: ARG002
            raise ValueError("too large")

    kernel = Broken()
    with caplog.at_level("DEBUG", "llmkit.execution"), Rehearsal(CPU):
        launch(kernel, (1,), torch.zeros(8))
    assert "too large" in caplog.text
    assert launch(kernel, (1,), torch.zeros(8)) == "launched"


def test_an_error_ends_it() -> None:
    kernel = Kernel()
    with pytest.raises(KeyError), Rehearsal(CPU):
        raise KeyError
    assert launch(kernel, (1,), torch.zeros(8)) == "launched"


def test_the_compiler_is_started_once_and_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one thread, however many want it; what fails is left to those who compile."""
    compiler = pytest.importorskip("triton.compiler.compiler")
    cache = pytest.importorskip("triton.runtime.cache")
    import triton

    calls: list[str] = []
    done = threading.Event()

    def hashed() -> str:
        calls.append("hash")
        done.set()
        raise OSError("no ptxas")

    monkeypatch.setattr(rehearsal, "_is_ready", False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: calls.append(f"device {index}"))
    monkeypatch.setattr(cache, "triton_key", lambda: calls.append("key"))
    monkeypatch.setattr(compiler, "make_backend", lambda target: SimpleNamespace(hash=hashed, target=target))
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(get_current_target=lambda: "target"))
    rehearsal.start_compiler(CPU)
    rehearsal.start_compiler(torch.device("cuda:1"))
    assert done.wait(30)
    rehearsal._get_ready()
    assert calls == ["device 1", "key", "hash"]
    rehearsal.start_compiler(torch.device("cuda:1"))
    assert calls == ["device 1", "key", "hash"]
