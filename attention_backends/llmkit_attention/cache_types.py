"""Keys and values in the type of the cache."""

from __future__ import annotations

import torch


def held_as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype`. What is too large for an 8-bit type becomes its largest number, not NaN or infinity, as these
    have so few that models do come to their end; NaN stays."""
    if dtype.itemsize == 1 and x.dtype != dtype:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)
