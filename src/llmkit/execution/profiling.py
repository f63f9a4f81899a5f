"""A trace of what torch does, step after step, written to a file."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from llmkit.errors import EngineError
from llmkit.metrics.step_parts import record_parts

if TYPE_CHECKING:
    from torch.profiler import profile

_NUMBERS = itertools.count(1)
_LOG_LEVEL, _NOTHING = "KINETO_LOG_LEVEL", "99"
"""What torch's profiler itself writes to the standard error, the first recording of a process decides."""


class TorchProfile:
    """At most one recording at a time, of the calling thread and, if it is a GPU, of `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profile: profile | None = None
        self._folder = Path()

    def start(self, folder: Path) -> None:
        """Record from now on. Raises EngineError if that goes on already, or if `folder` cannot be made."""
        from torch.profiler import ProfilerActivity, profile, record_function

        if self._profile is not None:
            raise EngineError("a profile is being recorded already.")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EngineError(f"the folder for profiles cannot be made: {error}.") from error
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        else:
            os.environ.setdefault(_LOG_LEVEL, _NOTHING)  # it reports that it found no driver, which nobody needs
        self._folder = folder
        # There is one cycle, so nothing is to be accumulated: without this some versions warn that nothing is.
        self._profile = profile(activities=activities, acc_events=True)
        self._profile.start()
        record_parts(record_function)

    def stop(self) -> Path:
        """Write the trace, in Chrome's format. Raises EngineError if nothing is recorded or it cannot be written."""
        if self._profile is None:
            raise EngineError("no profile is being recorded.")
        recorded, self._profile = self._profile, None
        record_parts(None)
        recorded.stop()
        path = self._folder.absolute() / f"llmkit-{os.getpid()}-{next(_NUMBERS)}.trace.json.gz"
        try:
            recorded.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise EngineError(f"the profile cannot be written: {error}.") from error
        return path

    def discard(self) -> None:
        """Stop recording, if that goes on."""
        if self._profile is not None:
            record_parts(None)
            self._profile.stop()
            self._profile = None
