"""How long OpenMP threads spin before they sleep."""

from __future__ import annotations

import os
import sys

SPIN_COUNT = 3000  # of libgomp: about 60 µs. Its default is a hundred times that.
_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def wait_briefly() -> None:
    """Let threads that wait for each other sleep soon. To be called before torch is imported, which loads libgomp;
    afterwards, or where the user has chosen, it does nothing.

    Thousands of times a second the threads of a step wait for the slowest. While another process has that one's
    processor, a spinning thread keeps its own from everybody, and the scheduler sees no idle processor to move the
    slow one to.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in _SETTINGS):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
