"""Whether compiled CPU kernels can work on a machine, for front doors; imports nothing heavy."""

from __future__ import annotations

from llmkit.hookspecs import Environment

_X86 = frozenset({"x86_64", "amd64", "i686", "i386", "x86"})
_NEEDED = ("avx2", "f16c", "fma")


def kernel_problems(environment: Environment) -> list[str]:
    """Why plugins with compiled CPU kernels cannot work here; empty when they can."""
    problems = []
    if environment.device_type != "cpu":
        problems.append(f"needs the CPU; the device is {environment.device_type}")
    if not environment.has_module("numba"):
        problems.append("needs numba, which is not installed")
    if environment.machine.lower() in _X86 and environment.cpu_flags:  # no flags: the platform does not tell them
        missing = [flag for flag in _NEEDED if flag not in environment.cpu_flags]
        if missing:
            problems.append(f"needs a processor with {', '.join(missing)}")
    return problems
