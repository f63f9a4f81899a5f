"""A model file holds what is particular to its architecture, and nothing else."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from llmkit.hookspecs import PluginInfo

MODELS = sorted(entry_points(group="llmkit.models"), key=lambda e: e.name)


def test_the_architectures_are_there() -> None:
    built_in = {e.name for e in MODELS if e.value.startswith("llmkit_models.")}
    assert built_in >= {
        f"{name}ForCausalLM" for name in ("Gemma3", "Llama", "Mistral", "Mixtral", "Phi3", "Qwen2", "Qwen3", "Qwen3Moe")
    }


@pytest.mark.parametrize("entry", [e for e in MODELS if e.value.startswith("llmkit_models.")], ids=lambda e: e.name)
def test_a_model_file_is_short(entry: object) -> None:
    module = entry.load()  # type: ignore[attr-defined]
    assert isinstance(module.info, PluginInfo)
    assert len(inspect.getsource(module).splitlines()) < 60


def test_front_doors_import_no_torch() -> None:
    """`llmkit plugins doctor` loads every front door and must stay quick."""
    modules = [
        *(entry.value for entry in MODELS if entry.value.startswith("llmkit_models.")),
        "llmkit_kernels.torch_reference",
        "llmkit_kernels.cpu",
        "llmkit_quantization.none",
        "llmkit_quantization.int8",
        "llmkit_quantization.int4",
        "llmkit_attention.torch_reference",
        "llmkit_attention.cpu",
    ]
    heavy = ("torch", "numba", "transformers")
    code = f"import sys, {', '.join(modules)}; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
