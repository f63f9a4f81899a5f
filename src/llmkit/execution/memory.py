"""The memory plan: what each part takes and how many KV blocks are left room for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part, and the result. `limited_by` says in words what set `num_blocks`."""

    total: int
    usable: int
    weights: int
    activations: int
    other: int
    block_bytes: int
    num_blocks: int
    limited_by: str
