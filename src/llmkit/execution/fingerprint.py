"""A fingerprint of what lies in a KV block: two engines with the same one may read each other's bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from llmkit.execution.building import BuiltModel
    from llmkit.execution.setup import WorkerSetup

_FORMAT = 1
_CHUNK = 1 << 20
"""Words summed at a time."""


class WeightsChecksum:
    """Two sums over all 32-bit words of all tensors: each change of one word changes the first, and a change of their
    order the second. Against accidents, not attacks; it costs a fraction of reading the weights."""

    def __init__(self) -> None:
        self._tensors: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        self._places = torch.arange(1, _CHUNK + 1)

    def counted(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass tensors through, adding them; holds none of them."""
        for name, tensor in tensors:
            self._tensors[name] = (str(tensor.dtype), tuple(tensor.shape), *self._sums(tensor))
            yield name, tensor
            del tensor

    def hexdigest(self) -> str:
        """The sums of all tensors by name, whatever the order in which they came."""
        return hashlib.blake2b(repr(sorted(self._tensors.items())).encode(), digest_size=16).hexdigest()

    def _sums(self, tensor: torch.Tensor) -> tuple[int, int]:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        padding = -flat.numel() % 4
        if padding:
            flat = torch.cat((flat, flat.new_zeros(padding)))
        words = flat.view(torch.int32)
        places = self._places = self._places.to(words.device)  # made once: it takes as long as the sums of a matrix
        plain = placed = 0
        for number, start in enumerate(range(0, words.numel(), _CHUNK)):
            chunk = words[start : start + _CHUNK].to(torch.int64)
            sum_ = int(chunk.sum())
            plain += sum_
            placed += int((chunk * places[: chunk.numel()]).sum()) + number * _CHUNK * sum_
        return plain % 2**64, placed % 2**64


def kv_fingerprint(built: BuiltModel, setup: WorkerSetup, weights: str) -> str:
    """32 hexadecimal digits. weights: checksum of what was loaded.

    Kernels are not part of it: they compute the same numbers up to rounding.
    """
    config, backend, page = setup.config, built.backend, built.page_size
    parts = {
        "format": _FORMAT,
        "model": setup.source.config,
        "weights": weights,
        # "longrope" has other frequencies for long contexts.
        "max_model_len": config.model.max_model_len if "long_factor" in str(setup.source.config) else None,
        "dtype": config.model.dtype,
        "quantization": [built.quantization, config.plugins.options.get("quantization", {})],
        "block_size": built.block_size,
        "page_size": page,
        "world_size": setup.world_size,
        "kv_format": backend.kv_format(),
        "groups": [
            (group.layers, str(group.spec), backend.kv_shape(1, page, group.spec.num_kv_heads, group.spec.head_size))
            for group in built.groups
        ],
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
