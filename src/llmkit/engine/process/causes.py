"""How the end of an engine process is told."""

from __future__ import annotations

from llmkit.errors import EngineDeadError, EngineError


def cause_of(words: str, log_tail: str, *, starting: bool) -> EngineError:
    """A process has ended without saying why. words: how it has ended; log_tail: the last lines of its log."""
    when = " while it was starting" if starting else ""
    log = f" The last lines of its log:\n{log_tail}" if log_tail else ""
    return EngineError(f"The engine process {words}{when}.{log}")


def given_up(cause: Exception, num_crashes: int, window_s: float) -> EngineDeadError:
    """The engine is not started again after so many crashes that no request can have caused, the last by `cause`."""
    times = f"{num_crashes} times in {window_s:g} s" if num_crashes > 1 else "once"
    return EngineDeadError(f"The engine process has crashed {times} and is not started again. The last time: {cause}")


def blame(words: str) -> str:
    """What the request is told that was found guilty of crashes, of which the last is described by `words`."""
    return f"The engine process {words} again and again while it computed this request, which is given up."
