"""Weights plugin `gguf`: one GGUF file with everything in it, or a folder with one such file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmkit.errors import ModelError, described
from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.hookspecs.weights import WeightsFormat

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    from llmkit.frontend.tokenizer import Tokenizer
    from llmkit_weights.gguf_file import GgufFile

info = PluginInfo(summary="GGUF file: weights, and configuration and tokenizer from its metadata")


_ROLES = {"token_embd.weight": "embedding", "output.weight": "lm_head"}


class GgufFormat(WeightsFormat):
    """Keeps the header of the file that was read last, which all methods need."""

    def __init__(self) -> None:
        self._opened: tuple[tuple[Path, int, int], GgufFile] | None = None

    def recognises(self, path: Path) -> bool:
        if path.is_dir():
            return any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
        try:
            with path.open("rb") as stream:
                return stream.read(4) == b"GGUF"
        except OSError:
            return False

    def config(self, path: Path) -> dict[str, Any]:
        from llmkit_weights.gguf_config import model_config

        with _damage_explained(path):
            return model_config(self._file(path))

    def generation_config(self, path: Path) -> dict[str, Any]:
        from llmkit_weights.gguf_config import generation_config

        with _damage_explained(path):
            return generation_config(self._file(path))

    def tokenizer(self, path: Path) -> Tokenizer | None:
        from llmkit_weights.gguf_tokenizer import build_tokenizer

        with _damage_explained(path):
            return build_tokenizer(self._file(path))

    def tensors(self, path: Path, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        from llmkit_weights.gguf_values import read_tensors

        with _damage_explained(path):
            yield from read_tensors(self._file(path), config)

    def stored_types(self, path: Path) -> Mapping[str, frozenset[str]]:
        from llmkit_weights.gguf_names import is_derived

        types: dict[str, set[str]] = defaultdict(set)
        for tensor in self._file(path).tensors.values():
            if len(tensor.shape) > 1 and not is_derived(tensor.name):
                types[_ROLES.get(tensor.name, "linear")].add(tensor.type_name)
        return {role: frozenset(names) for role, names in types.items()}

    def size_bytes(self, path: Path) -> int | None:
        from llmkit_weights.gguf_names import is_derived
        from llmkit_weights.gguf_values import yielded_bytes

        tensors = self._file(path).tensors.values()
        return sum(yielded_bytes(tensor) for tensor in tensors if not is_derived(tensor.name))

    def _file(self, path: Path) -> GgufFile:
        from llmkit_weights.gguf_file import GgufFile

        file_path = _single_file(path) if path.is_dir() else path
        status = file_path.stat()
        key = (file_path, status.st_mtime_ns, status.st_size)
        if self._opened is None or self._opened[0] != key:
            self._opened = (key, GgufFile(file_path))
        return self._opened[1]


@contextmanager
def _damage_explained(path: Path) -> Iterator[None]:
    """Every value in a file may have been changed into any other, of any type: what reading them then raises is the
    file's fault, down to panics of the tokenizer library, which are no Exceptions."""
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(
            f"{path} is damaged: its metadata cannot be made sense of ({described(error)}).", hint="Fetch it again."
        ) from error


def _single_file(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise ModelError(f"{folder} should hold one GGUF file, it has {names}.", hint="Name the file itself.")
    return files[0]


@hookimpl
def llmkit_weights(options: BaseModel | None) -> WeightsFormat:  # noqa: ARG001
    return GgufFormat()
