"""Weights plugin `safetensors`: a Hugging Face folder, or one .safetensors file beside its config.json."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmkit.errors import ModelError
from llmkit.frontend.model_files import read_json, read_json_if_any
from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.hookspecs.weights import WeightsFormat

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    from llmkit.frontend.tokenizer import Tokenizer

info = PluginInfo(summary="Hugging Face folder with safetensors files, single or sharded")


class SafetensorsFormat(WeightsFormat):
    """Reads headers first, all of them, so that a damaged file is reported before anything is loaded."""

    def recognises(self, path: Path) -> bool:
        if path.is_file():
            return path.suffix == ".safetensors"
        if not (path / "config.json").is_file():
            return False
        # Folders of GGUF files often keep a config.json too.
        return any(path.glob("*.safetensors")) or not any(path.glob("*.gguf"))

    def config(self, path: Path) -> dict[str, Any]:
        from llmkit_weights.safetensors_folder import find_files

        config = read_json(_folder(path) / "config.json")
        find_files(path)
        quantization = config.get("quantization_config")
        if quantization:
            method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
            raise ModelError(
                f"The weights in {path} are stored quantised ({method}), which the safetensors reader cannot unpack.",
                hint="Use an unquantised copy with --quantization int8 or int4, or a GGUF file.",
            )
        return config

    def generation_config(self, path: Path) -> dict[str, Any]:
        return read_json_if_any(_folder(path) / "generation_config.json")

    def tokenizer(self, path: Path) -> Tokenizer | None:
        from llmkit.frontend.tokenizers_hf import load_hf_tokenizer

        return load_hf_tokenizer(_folder(path))

    def tensors(self, path: Path, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:  # noqa: ARG002
        from llmkit_weights.safetensors_file import read_tensors
        from llmkit_weights.safetensors_folder import check_tensors, find_files

        for file, entries in check_tensors(find_files(path)).items():
            yield from read_tensors(file, entries)

    def size_bytes(self, path: Path) -> int | None:
        from llmkit_weights.safetensors_folder import check_tensors, find_files

        return sum(entry.nbytes for entries in check_tensors(find_files(path)).values() for entry in entries)


def _folder(path: Path) -> Path:
    return path.parent if path.is_file() else path


@hookimpl
def llmkit_weights(options: BaseModel | None) -> WeightsFormat:  # noqa: ARG001
    return SafetensorsFormat()
