"""The backends around attention libraries, without them: the suite under Triton's interpreter with libraries of the
same names in plain torch, and what the front doors say."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmkit.hookspecs import Environment
from llmkit.hookspecs.attention import AttentionLayer, AttentionQuery
from llmkit.registry import Registry, loading
from llmkit_attention import flash_attn_backend, flash_attn_paged, flashinfer_backend, flashinfer_paged

GPU = Environment(device_type="cuda", compute_capability=(9, 0))
QUERY = AttentionQuery("cuda", (9, 0), torch.bfloat16, torch.bfloat16, 32, 8, 128)
HERE = Path(__file__).parent

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def _not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.long
def test_the_suite_with_stand_ins_for_the_libraries(interpreted: Callable[..., list[str]]) -> None:
    plugins = [f"attention:library_doors:{name}" for name in ("FlashInfer", "FlashAttn")]
    flags = [f"--llmkit-conformance={plugin}" for plugin in plugins]
    passed = interpreted(*flags, PYTHONPATH=os.pathsep.join((str(HERE), str(HERE / "fakes"))))
    for plugin in plugins:
        count = sum(f"[{plugin}" in test for test in passed)
        assert count >= 38, f"checks of the suite were skipped for {plugin}: {count}"


@pytest.mark.parametrize(
    ("door", "module", "hint"),
    [
        (flashinfer_paged, "flashinfer", "flashinfer-python>=0.6.12,<0.7"),
        (flash_attn_paged, "flash_attn", "flash-attn-4[cu13]>=4.0.0b36,<5"),
    ],
)
def test_problems(door: Any, module: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Environment, "has_module", lambda *_: True)
    assert door.llmkit_problems(GPU) == []
    assert door.llmkit_problems(replace(GPU, compute_capability=None)) == []  # judged without a GPU
    (problem,) = door.llmkit_problems(Environment())
    assert "needs a CUDA GPU" in problem
    (problem,) = door.llmkit_problems(replace(GPU, compute_capability=(7, 5)))
    assert "7.5" in problem
    monkeypatch.setattr(Environment, "has_module", lambda _, name: name != module)
    (problem,) = door.llmkit_problems(GPU)
    assert f"pip install '{hint}'" in problem


def test_flash_attention_has_no_paged_cache_on_other_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Environment, "has_module", lambda *_: True)
    assert flash_attn_paged.llmkit_problems(replace(GPU, compute_capability=(10, 0))) == []
    for capability in ((8, 0), (8, 9), (12, 0)):
        (problem,) = flash_attn_paged.llmkit_problems(replace(GPU, compute_capability=capability))
        assert "9.x and 10.x" in problem


def test_flashinfer_needs_a_compiler_or_compiled_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Environment, "has_module", lambda _, name: name != "flashinfer_jit_cache")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (problem,) = flashinfer_paged.llmkit_problems(GPU)
    assert "nvcc" in problem
    monkeypatch.setattr(Environment, "has_module", lambda *_: True)
    assert flashinfer_paged.llmkit_problems(GPU) == []
    monkeypatch.setattr(Environment, "has_module", lambda _, name: name != "flashinfer_jit_cache")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert flashinfer_paged.llmkit_problems(GPU) == []


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"device_type": "cpu", "compute_capability": None}, "not on cpu"),
        ({"compute_capability": (7, 0)}, "7.0"),
        ({"head_size": 80}, "head size 80"),
        ({"kv_dtype": torch.float16}, "float16"),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, "float32"),
        ({"num_heads": 33}, "33 query heads"),
    ],
)
@pytest.mark.parametrize("door", [flashinfer_paged, flash_attn_paged])
def test_they_say_what_they_cannot_do(door: Any, changes: dict[str, Any], part: str) -> None:
    backend = door.llmkit_attention_backend(door.info.options())
    assert any(part in reason for reason in backend.support(replace(QUERY, **changes)).reasons)
    assert backend.support(QUERY).reasons == ()


def test_building_them_imports_no_library() -> None:
    """`auto` builds all that may be chosen."""
    program = (
        "import sys, llmkit_attention.flashinfer_paged as a, llmkit_attention.flash_attn_paged as b\n"
        "assert 'torch' not in sys.modules\n"
        "for door in (a, b): door.llmkit_attention_backend(door.info.options())\n"
        "assert not {'flashinfer', 'flash_attn'} & set(sys.modules)\n"
    )
    variables = os.environ | {"PYTHONPATH": str(HERE / "fakes")}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in for the library, in this process; gone afterwards. The environment says nothing of folders."""
    from llmkit_attention import flashinfer_steps

    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(HERE / "fakes"))
    monkeypatch.delenv("FLASHINFER_WORKSPACE_BASE", raising=False)
    yield flashinfer_steps
    os.environ.pop("FLASHINFER_WORKSPACE_BASE", None)
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "flashinfer":
            del sys.modules[name]


def test_flash_attention_s_compiler_does_not_warn_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE / "fakes"))
    for name in ("ENABLED", "DIR"):
        monkeypatch.setenv(f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}", "0")  # or it would stay set
    before = set(sys.modules)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        flash_attn_backend._library()
        for message, module in (
            ("Argument aux_data (position 17) cannot be converted to a JitArgument", "cutlass.base_dsl.dsl"),
            ("Argument aux_data", "elsewhere"),
            ("something else", "cutlass.base_dsl.dsl"),
        ):
            warnings.warn_explicit(message, UserWarning, "dsl.py", 1, module=module)
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "flash_attn":
            del sys.modules[name]
    assert len(seen) == 2


@pytest.mark.parametrize("kept", [True, False], ids=["not copied yet", "copied"])
def test_a_plan_that_is_being_copied_outlives_its_step(
    flashinfer: Any, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """A wrapper has the pinned memory that its plan is copied from, and torch does not know of the copy."""
    monkeypatch.setattr(flashinfer._Copy, "is_done", not kept)
    layer = AttentionLayer(0, 4, 2, 64, 0.1)
    lists = SimpleNamespace(
        device_starts=torch.zeros(3, dtype=torch.int32),
        pages=torch.zeros(4, dtype=torch.int32),
        last=torch.ones(2, dtype=torch.int32),
    )
    workspace = flashinfer.Workspace(1, torch.device("cpu"))
    planned, dropped = workspace.decodes(layer, torch.bfloat16, lists, 16)
    wrapper = weakref.ref(planned._wrapper)
    dropped()
    del planned, dropped
    _ = workspace.decodes(layer, torch.bfloat16, lists, 16)
    assert (wrapper() is not None) == kept
    monkeypatch.setattr(flashinfer._Copy, "is_done", True)
    _ = workspace.decodes(layer, torch.bfloat16, lists, 16)
    assert wrapper() is None


def test_the_workspace_is_said_ahead() -> None:
    """What is not the library's own takes nothing."""
    backend = flashinfer_paged.llmkit_attention_backend(flashinfer_paged.FlashInferOptions(workspace_mib=48))
    assert backend.workspace_bytes() == 48 * 2**20
    assert flash_attn_paged.llmkit_attention_backend(flash_attn_paged.info.options()).workspace_bytes() == 0


def test_what_flashinfer_compiles_is_kept_in_llmkit_s_folder(flashinfer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMKIT_CACHE", "/somewhere/llmkit")
    flashinfer.Workspace(1, torch.device("cpu"))
    assert os.environ["FLASHINFER_WORKSPACE_BASE"] == str(Path("/somewhere/llmkit/flashinfer"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "/mine")
    flashinfer.Workspace(1, torch.device("cpu"))
    assert os.environ["FLASHINFER_WORKSPACE_BASE"] == "/mine"


def test_auto_goes_by_what_was_measured_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every library installed."""
    monkeypatch.setattr(Environment, "has_module", lambda *_: True)
    monkeypatch.setattr(loading, "missing_requirements", lambda _: [])

    def chosen(environment: Environment, query: AttentionQuery) -> Any:
        registry = Registry.discover()
        registry.create("attention", "auto", environment, judge=lambda backend: backend.support(query))
        return registry.selections[-1]

    def on(capability: tuple[int, int], **changes: Any) -> Any:
        return chosen(
            replace(GPU, compute_capability=capability), replace(QUERY, compute_capability=capability, **changes)
        )

    hopper = on((9, 0))
    assert hopper.name == "flash_attn"
    assert flash_attn_backend.PREFERENCE[1] in hopper.reason
    assert flashinfer_backend.GROUNDS in hopper.rejected["flashinfer"]
    assert on((9, 0), head_size=80).name == "triton"
    assert on((9, 0), dtype=torch.float32, kv_dtype=torch.float32).name == "triton"
    blackwell = on((10, 0))
    assert blackwell.name == "triton"
    assert "not measured on this GPU" in blackwell.rejected["flash_attn"]
    ampere = on((8, 0))
    assert ampere.name == "triton"
    assert "9.x and 10.x" in ampere.rejected["flash_attn"]
