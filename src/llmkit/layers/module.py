"""A torch module without the call machinery, and the contract by which layers take their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class WeightSlot:
    """Where one tensor of a checkpoint goes. shape: the whole tensor's. load: called once with a tensor of it."""

    shape: tuple[int, ...]
    load: Callable[[torch.Tensor], None]


def stacked_slot(slots: Sequence[WeightSlot]) -> WeightSlot:
    """One slot for a tensor in which those of `slots` lie one after the other along the first dimension."""
    rows = [slot.shape[0] for slot in slots]

    def load(tensor: torch.Tensor) -> None:
        for slot, part in zip(slots, torch.split(tensor, rows), strict=True):
            slot.load(part)

    return WeightSlot((sum(rows), *slots[0].shape[1:]), load)


class Module(nn.Module):
    """`nn.Module` whose call goes straight to `forward`: no hooks, a tenth of the overhead.

    A decode step on a small model makes hundreds of module calls; nn.Module's dispatch would cost as much as the
    arithmetic of the small ones. For the same reason child modules are plain attributes, too, found without
    nn.Module's `__getattr__`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_modules", ()):
            self.__dict__.pop(name, None)
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        if name in self._modules:
            self.__dict__.pop(name, None)
        super().__delattr__(name)

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:  # noqa: ARG002
        """(checkpoint name, slot) of the tensors that this module itself holds, not its children.

        path: the module's place in the model, e.g. "model.layers.0.mlp.gate_up_proj". Asking for the slots
        prepares the module for loading and forgets what it held.
        """
        return iter(())

    def parameter_bytes(self) -> int:
        """Bytes that the weights of this module itself take once loaded; its children not counted."""
        return 0

    def activation_width(self) -> int:
        """Elements a token that the temporaries of this module's forward pass take at their widest, where that is more
        than an ordinary decoder layer of the configuration's sizes takes; 0 otherwise."""
        return 0
