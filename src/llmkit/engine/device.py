"""The machine: which device to run on, what its processor can do, how many threads there are."""

from __future__ import annotations

import math
import os
from pathlib import Path

from llmkit.errors import ConfigError
from llmkit.hookspecs.plugin import Environment

# How /proc/cpuinfo names the instructions that multiply bfloat16 in hardware: x86 AVX-512 and AMX, ARM v8.6.
_FAST_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def resolve_device(device: str) -> str:
    """ "cpu", "cuda" or "cuda:N" for a configured device; "auto" is the first GPU, or the CPU.

    Raises ConfigError for a device that does not exist here. Imports torch.
    """
    import torch

    kind, _, index = device.partition(":")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return device
    if kind != "cuda" or (":" in device and not index.isdecimal()):
        raise ConfigError(f'execution.device must be "auto", "cpu", "cuda" or "cuda:N", got {device!r}.')
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise ConfigError(f"execution.device is {device!r}, but no CUDA device can be used here.")
    if index and int(index) >= count:
        raise ConfigError(f"execution.device is {device!r}, but the CUDA devices here are cuda:0 to cuda:{count - 1}.")
    return device


def has_fast_bfloat16(environment: Environment) -> bool:
    """Whether products in bfloat16 run in hardware, and are not emulated many times slower."""
    if environment.device_type == "cuda":
        return environment.compute_capability is not None and environment.compute_capability >= (8, 0)
    return bool(_FAST_BFLOAT16 & environment.cpu_flags)


def usable_processors() -> int:
    """Processors that this process may use: its affinity, and the quota of its control group."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(affinity, _quota() or affinity))


def _quota() -> int | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return None
