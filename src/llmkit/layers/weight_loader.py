"""Carries a checkpoint's tensors to the layers that hold them, and says exactly what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

import torch

from llmkit.errors import ModelError
from llmkit.layers.module import Module, WeightSlot

if TYPE_CHECKING:
    from torch import nn

_SHOWN = 6  # names listed in one message
# Buffers that old versions of transformers saved; they follow from the configuration.
_DERIVED = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")


def load_into(
    model: nn.Module,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    rename: Callable[[str], str | None] | None = None,
    ignore: Collection[str] = frozenset(),
    allow_unknown_layers: bool = False,
) -> None:
    """Fill the weight slots of `model` and all its children from (checkpoint name, tensor) pairs.

    rename: checkpoint name → slot name, None: skip; not asked about names that are a slot's already. ignore: slot names
    that are skipped. allow_unknown_layers: tensors without a slot are other workers' and skipped. Raises ModelError
    naming mis-shaped, missing, repeated and unexpected tensors; after an error the model must not be used.
    """
    slots = weight_slots(model)
    filled: set[str] = set()
    unexpected: list[str] = []
    for given_name, tensor in tensors:
        name = rename(given_name) if rename is not None and given_name not in slots else given_name
        if name is None or name in ignore or name.endswith(_DERIVED):
            continue
        slot = slots.get(name)
        if slot is None:
            unexpected.append(given_name)
            continue
        if name in filled:
            raise ModelError(f"The checkpoint has the tensor {given_name} twice.")
        _check(given_name, tensor, slot)
        slot.load(tensor)
        filled.add(name)
    missing = sorted(slots.keys() - filled, key=list(slots).index)
    if allow_unknown_layers:
        unexpected = []
    _report(missing, unexpected)


def weight_slots(model: nn.Module) -> dict[str, WeightSlot]:
    """The slots of `model` and all its children by name. They are prepared for loading and forget what they held."""
    slots: dict[str, WeightSlot] = {}
    for path, module in model.named_modules():
        if isinstance(module, Module):
            slots.update(module.weight_slots(path))
    return slots


def _check(name: str, tensor: torch.Tensor, slot: WeightSlot) -> None:
    if tuple(tensor.shape) != slot.shape:
        raise ModelError(
            f"The checkpoint's tensor {name} has the shape {list(tensor.shape)}, but config.json asks for "
            f"{list(slot.shape)}."
        )
    if not tensor.is_floating_point():
        raise ModelError(f"The checkpoint's tensor {name} is of type {tensor.dtype}, not a floating-point type.")


def _report(missing: list[str], unexpected: list[str]) -> None:
    parts = []
    if missing:
        parts.append(f"The checkpoint lacks {_listed(missing)}.")
    if unexpected:
        parts.append(f"The checkpoint has {_listed(unexpected)}, which this architecture does not use.")
    if not parts:
        return
    hint = None
    if missing == ["lm_head.weight"]:
        hint = "If the model shares it with the embedding, config.json must say tie_word_embeddings = true."
    raise ModelError(" ".join(parts), hint=hint)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} tensors: {shown}{more}" if len(names) > 1 else f"the tensor {shown}"
