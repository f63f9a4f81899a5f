"""From the tensors of a checkpoint to the parameters of a model of transformers."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from llmkit.errors import ModelError, described
from llmkit.layers.module import Module, WeightSlot

Named = tuple[str, torch.Tensor]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside have their parameters on the meta device, where they take no memory; buffers, which follow
    from the configuration, are made as usual.

    What is made without values is never made at all: a matrix need not fit the memory twice, nor at all in a dry run.
    """
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.data.to("meta"), requires_grad=False)
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        with _NothingEmpty():
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


class _NothingEmpty(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.empty:
            return func(*args, **{**(kwargs or {}), "device": "meta"})
        return func(*args, **(kwargs or {}))


def tensor_slots(model: nn.Module, tied: Mapping[str, str], device: torch.device) -> Iterator[tuple[str, WeightSlot]]:
    """A slot for every parameter and persistent buffer of `model`, and those of llmkit's layers inside it. tied: names
    that are filled with another's tensor."""
    for path, module in model.named_modules():
        if isinstance(module, Module):
            yield from module.weight_slots(path.removesuffix(".inner"))
            continue
        prefix = f"{path}." if path else ""
        persistent = {k: v for k, v in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for name, tensor in (*module._parameters.items(), *persistent.items()):
            if tensor is not None and prefix + name not in tied:
                yield prefix + name, WeightSlot(tuple(tensor.shape), partial(_load, module, name, tensor.dtype, device))


def _load(module: nn.Module, name: str, dtype: torch.dtype, device: torch.device, tensor: torch.Tensor) -> None:
    # A copy: the reader's tensor may be a view of a mapped file.
    copied = torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(copied, requires_grad=False)
    else:
        module._buffers[name] = copied


def tie(model: nn.Module, tied: Mapping[str, str]) -> None:
    """Give every tied parameter the tensor that it is tied to."""
    for target, source in tied.items():
        owner, _, name = target.rpartition(".")
        module = model.get_submodule(owner)
        if name in module._parameters:
            module._parameters[name] = model.get_parameter(source)


class Conversion:
    """Renames, merges and splits the tensors of checkpoints as transformers itself does when it loads them.

    `model`: as transformers built it, before anything in it was replaced.
    """

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        transforms = get_model_conversion_mapping(model)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._of_pattern = {pattern: c for c in self._converters for pattern in c.source_patterns}
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self._model = copy.deepcopy(model).to("meta")
        self._prefix = model.base_model_prefix
        self._ignored = [re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or ()]

    def __call__(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """(name in the checkpoint, tensor) pairs → (name of the parameter, tensor) pairs. What is merged out of several
        tensors is held until the last of them has come. Raises ModelError for tensors that do not fit together."""
        groups: dict[str, list[tuple[str, str, torch.Tensor]]] = {}
        for given, tensor in tensors:
            name, pattern = self._renamed(given)
            if pattern is None or name not in self._shapes:
                if name in self._shapes or not any(p.search(given) for p in self._ignored):
                    yield (name if name in self._shapes else given), tensor
                continue
            group = groups.setdefault(name, [])
            group.append((given, pattern, tensor))
            if sum(t.numel() for _, _, t in group) == self._shapes[name].numel():
                yield from self._converted(name, groups.pop(name))
        for name, group in groups.items():
            yield from self._converted(name, group)

    def _renamed(self, given: str) -> tuple[str, str | None]:
        """The name of the parameter, and the pattern of the converter that makes it, if one does."""
        from transformers.core_model_loading import rename_source_key

        known = self._shapes
        name, pattern = rename_source_key(given, self._renamings, self._converters, self._prefix, known)
        if name not in known and given in known:
            return given, None
        return name, pattern

    def _converted(self, name: str, group: list[tuple[str, str, torch.Tensor]]) -> Iterator[Named]:
        from transformers.core_model_loading import dot_natural_key

        converter = copy.deepcopy(self._of_pattern[group[0][1]])
        # Experts are stacked in the order in which they are added.
        for given, pattern, tensor in sorted(group, key=lambda entry: dot_natural_key(entry[0])):
            converter.add_tensor(name, given, pattern, tensor)
        try:
            made = converter.convert(name, model=self._model, config=self._model.config)
        except Exception as error:
            names = ", ".join(given for given, _, _ in group[:3])
            raise ModelError(
                f"{len(group)} tensors of the checkpoint ({names}, …) cannot be made into {name}: {described(error)}."
            ) from error
        for target, tensor in made.items():
            yield target, tensor[0] if isinstance(tensor, list) else tensor
