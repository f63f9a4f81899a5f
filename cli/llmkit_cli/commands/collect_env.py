"""`llmkit collect-env`: versions, processor, devices and plugins, as text or JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

PACKAGES = (
    "llmkit",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "numba",
    "numpy",
    "pydantic",
)


@app.command()
def collect_env(
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Print what a bug report needs: versions, processor, memory, devices, plugins."""
    facts = gather()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for section, values in facts.items():
        typer.secho(section, bold=True)
        for key, value in values.items():
            typer.echo(f"  {key}: {value}")


def gather() -> dict[str, dict[str, Any]]:
    """Section → name → value, all JSON-encodable."""
    return {
        "system": system_facts(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "torch": torch_facts(),
        "plugins": plugin_facts(),
        "environment": {
            k: v for k, v in sorted(os.environ.items()) if k.startswith(("LLMKIT_", "OMP_", "CUDA_", "NUMBA_"))
        },
    }


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def system_facts() -> dict[str, Any]:
    import psutil

    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def torch_facts() -> dict[str, Any]:
    import torch

    from llmkit.cuda_devices import cuda_devices

    facts: dict[str, Any] = {
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda or "none",
    }
    count, why_none = cuda_devices()
    if why_none is not None:
        facts["no cuda device"] = why_none
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        facts[f"cuda:{index}"] = f"{properties.name}, {memory:.1f} GiB, sm_{properties.major}{properties.minor}"
    return facts


def plugin_facts() -> dict[str, str]:
    from llmkit.hookspecs.kinds import KINDS
    from llmkit.registry import Registry

    registry = Registry.discover()
    return {kind.name: ", ".join(row.name for row in registry.find(kind.name)) or "none" for kind in KINDS}
