"""What machine this is, for plugins to judge whether they can work on it."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from llmkit.cuda_devices import cuda_devices
from llmkit.hookspecs.plugin import Environment

_CPUINFO = Path("/proc/cpuinfo")


def detect_environment(device_type: str = "cpu") -> Environment:
    """The environment for `device_type`, "cpu" or "cuda" ("cuda:1" for the second GPU).

    torch is imported only for "cuda"; `compute_capability` is then None if there is no such device.
    """
    kind, _, index = device_type.partition(":")
    return Environment(
        device_type=kind,
        compute_capability=_compute_capability(int(index or 0)) if kind == "cuda" else None,
        platform=sys.platform,
        machine=platform.machine(),
        cpu_flags=_cpu_flags(),
    )


def _compute_capability(index: int) -> tuple[int, int] | None:
    if index >= cuda_devices()[0]:
        return None
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    return major, minor


def _cpu_flags() -> frozenset[str]:
    """Instruction sets of the first processor, as Linux names them ("flags" on x86, "Features" on Arm); elsewhere
    unknown, so empty."""
    try:
        with _CPUINFO.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return frozenset(value.split())
    except OSError:
        return frozenset()
    return frozenset()
