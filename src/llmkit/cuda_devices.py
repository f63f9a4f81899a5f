"""Whether there are CUDA devices, and what torch has to say about it."""

from __future__ import annotations

import warnings


def cuda_devices() -> tuple[int, str | None]:
    """How many CUDA devices can be used, and why none can, as far as torch knows: None with a build for CPUs, or where
    there is no driver. Imports torch.

    torch tells of a driver that is too old, or does not answer, by a Python warning, which names a line of torch's and
    is lost where warnings are.
    """
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    reasons = dict.fromkeys(str(warning.message).partition(" (Triggered internally")[0] for warning in caught)
    return count, None if count else " ".join(reasons) or None
