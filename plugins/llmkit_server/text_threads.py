"""Threads for work on long texts: tokenising, rendering. Beside the event loop, and few at a time."""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

NUM_THREADS = 2
"""Tokenising takes about 150 bytes of memory for each byte of text, so that not many texts of megabytes may be under
way at once."""


class TextThreads:
    """What does not fit its threads waits for its turn."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(NUM_THREADS, "llmkit-text")

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's result, from another thread. Raises what it raises. Who is cancelled while waiting for a turn
        gives it up; a function that runs goes on to its end."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, partial(_and_give_back, function, *args, **kwargs))


def _and_give_back(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return function(*args, **kwargs)
    finally:
        # glibc keeps for each thread what it has freed: gigabytes, after texts of megabytes.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
        if trim is not None:
            trim(0)
