"""Random values, made fast: one block of normal numbers is drawn and copied, at an offset that is each tensor's own.

Drawing 8 billion numbers would take a minute; copying them takes as long as writing the memory.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch

# A prime, so that no row length divides it and equal rows do not recur within a matrix.
_BLOCK = 1_048_583


class DummyValues:
    """Values as after initialisation: norms are 1, everything else is normal with `initializer_range`.

    Biases are drawn too, where an initialisation would zero them: a layer that forgot its bias should show it.
    The type is the configuration's dtype, float32 if it names none.
    """

    def __init__(self, seed: int, config: dict[str, Any]) -> None:
        name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        self._dtype = getattr(torch, name)
        self._seed = seed
        generator = torch.Generator().manual_seed(seed)
        scale = float(config.get("initializer_range") or 0.02)
        self._block = (torch.randn(_BLOCK, generator=generator) * scale).to(self._dtype)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The values of tensor `name`, in memory of its own."""
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype)
        flat = torch.empty(math.prod(shape), dtype=self._dtype)
        offset = _offset(self._seed, name)
        first = self._block[offset : offset + flat.numel()]
        flat[: first.numel()] = first
        for start in range(first.numel(), flat.numel(), _BLOCK):
            piece = flat[start : start + _BLOCK]
            piece.copy_(self._block[: piece.numel()])
        return flat.view(shape)


def _offset(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _BLOCK
