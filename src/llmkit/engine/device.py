"""The machine: which device to run on, what its processor can do, how many threads there are."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path

from llmkit.cuda_devices import cuda_devices
from llmkit.errors import ConfigError
from llmkit.hookspecs.plugin import Environment

logger = logging.getLogger("llmkit.engine")

# How /proc/cpuinfo names the instructions that multiply bfloat16 in hardware: x86 AVX-512 and AMX, ARM v8.6.
_FAST_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def resolve_device(device: str) -> str:
    """ "cpu", "cuda" or "cuda:N" for a configured device; "auto" is the first GPU, or the CPU.

    Why there is no GPU is logged for "auto", if torch says so. Raises ConfigError for a device that does not exist
    here. Imports torch.
    """
    kind, _, index = device.partition(":")
    if device == "auto":
        count, why_none = cuda_devices()
        if why_none is not None:
            logger.warning("no CUDA device can be used, so the engine runs on the CPU: %s", why_none)
        return "cuda" if count else "cpu"
    if device == "cpu":
        return device
    if kind != "cuda" or (":" in device and not index.isdecimal()):
        raise ConfigError(f'execution.device must be "auto", "cpu", "cuda" or "cuda:N", got {device!r}.')
    count, why_none = cuda_devices()
    if count == 0:
        why = f": {why_none}" if why_none else "."
        raise ConfigError(f"execution.device is {device!r}, but no CUDA device can be used here{why}")
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
