"""How many rows of logits to work on at a time."""

from __future__ import annotations

import torch

# On the CPU what stays in the cache and in memory that is already mapped, elsewhere what bounds the temporaries.
_CPU_ENTRIES = 1 << 18
_DEVICE_ENTRIES = 1 << 23


def chunk_rows(logits: torch.Tensor) -> int:
    """Rows of logits [n, v], at least 1, for operations that need several temporaries of their size."""
    entries = _CPU_ENTRIES if logits.device.type == "cpu" else _DEVICE_ENTRIES
    return max(1, entries // logits.shape[-1])
