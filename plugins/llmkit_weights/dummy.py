"""Weights plugin `dummy`: random weights for a configuration, to measure and test without a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmkit.frontend.model_files import read_json, read_json_if_any
from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.hookspecs.weights import WeightsFormat

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    from llmkit.frontend.tokenizer import Tokenizer

info = PluginInfo(summary="random weights for a config.json, or for model.overrides alone", auto=False)


class DummyFormat(WeightsFormat):
    """Makes up whatever tensors the model takes. Values depend on `seed`, the tensor's name and its shape only."""

    needs_files = False

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._shapes: Mapping[str, tuple[int, ...]] = {}

    def recognises(self, path: Path) -> bool:
        return (path / "config.json").is_file()

    def config(self, path: Path) -> dict[str, Any]:
        return read_json(path / "config.json")

    def generation_config(self, path: Path) -> dict[str, Any]:
        return read_json_if_any(path / "generation_config.json")

    def tokenizer(self, path: Path) -> Tokenizer | None:
        from llmkit.frontend.tokenizers_hf import load_hf_tokenizer

        return load_hf_tokenizer(path)

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def tensors(self, path: Path, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:  # noqa: ARG002
        from llmkit_weights.dummy_tensors import DummyValues

        values = DummyValues(self._seed, config)
        for name, shape in self._shapes.items():
            yield name, values.tensor(name, shape)


@hookimpl
def llmkit_weights(options: BaseModel | None, seed: int) -> WeightsFormat:  # noqa: ARG001
    return DummyFormat(seed)
