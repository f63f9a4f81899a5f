"""Kind `weights`: a file format that holds a model: its configuration, tokenizer and tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmkit.hookspecs.markers import hookspec

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    from llmkit.frontend.tokenizer import Tokenizer


class WeightsFormat(ABC):
    """Reads one format. Nothing is unpickled and no code from the model is run.

    `needs_files = False`: the format can make a model of configuration keys alone (`model.overrides`), without a path.
    """

    needs_files: bool = True

    @abstractmethod
    def recognises(self, path: Path) -> bool:
        """Whether `path` (a file or a folder) is in this format; looks at names and magic numbers only."""

    @abstractmethod
    def config(self, path: Path) -> dict[str, Any]:
        """The model's configuration with the keys of a Hugging Face `config.json`, `architectures` included.

        Raises ModelError if there is none or it cannot be read.
        """

    def generation_config(self, path: Path) -> dict[str, Any]:
        """Keys of a Hugging Face `generation_config.json`; empty if there is none."""
        return {}

    @abstractmethod
    def tokenizer(self, path: Path) -> Tokenizer | None:
        """The model's tokenizer, None if it has none (then only token ids are accepted)."""

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Told before `tensors` is called which tensors the model takes, by name, and their shapes. Formats that read
        files have no use for it: what is missing or misshapen, the model says. One that makes tensors up has."""
        return

    @abstractmethod
    def tensors(self, path: Path, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) pairs on the host, named as in the Hugging Face checkpoint of the architecture,
        dequantised, each yielded once and not kept alive by the reader.

        Raises ModelError if a file is missing, cut short or does not belong.
        """

    def stored_types(self, path: Path) -> Mapping[str, frozenset[str]]:
        """Role of a weight ("linear", "lm_head" or "embedding") → the types in which the files hold the matrices of
        that role, named as GGUF names them ("Q4_1", "F16"). Empty if that is not known: then no quantization method
        can tell that it would hold the same numbers."""
        return {}

    def size_bytes(self, path: Path) -> int | None:
        """Bytes of tensor data, for the progress bar; None if unknown."""
        return None


@hookspec(firstresult=True)
def llmkit_weights(options: BaseModel | None, seed: int) -> WeightsFormat:  # type: ignore[empty-body]
    """Build the reader. `options` is an instance of `info.options`, validated; None if there is none. `seed` is
    `model.seed`, for formats that make weights up.

    .. versionadded:: 0.1
    """
