"""One safetensors file: its header, checked, and its tensors, read without mapping the file.

A mapped file stays resident beside the copies that are made of it; reading each tensor's bytes straight into the
memory that is handed on needs no more than the tensors themselves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmkit.errors import ModelError

if TYPE_CHECKING:
    import torch

# Bytes per element; types that a dense checkpoint does not use (float8, …) are refused by name.
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file: `start` is the position of its first byte in the file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors that `file` holds, by name, in the order of their bytes.

    Raises ModelError if the file is missing, cut short, or contradicts itself."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if size < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelError(
                    f"{file} is cut short or not a safetensors file: its header should end at byte "
                    f"{8 + header_bytes}, the file has {size}."
                )
            text = stream.read(header_bytes)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}.") from error
    entries = [
        _entry(file, name, value, 8 + header_bytes) for name, value in _parse(file, text) if name != "__metadata__"
    ]
    for entry in entries:
        if entry.start + entry.nbytes > size:
            raise ModelError(
                f"{file} is cut short: tensor {entry.name} ends at byte {entry.start + entry.nbytes}, "
                f"the file has {size}.",
                hint="Fetch it again.",
            )
    return {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.start)}


def _parse(file: Path, text: bytes) -> list[tuple[str, Any]]:
    """The header's (name, value) pairs. A plain dict would silently keep the last of two equal names."""
    try:
        header = json.loads(text, object_pairs_hook=lambda pairs: reject_duplicates(file, pairs))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"The header of {file} is damaged: {error}.") from error
    if not isinstance(header, dict):
        raise ModelError(f"The header of {file} is damaged: it is not an object.")
    return list(header.items())


def reject_duplicates(file: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`pairs` as a dict. Raises ModelError naming the name that is there twice."""
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ModelError(f"{file} lists {name} twice.")
        result[name] = value
    return result


def _entry(file: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        whole = all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"The header of {file} is damaged at tensor {name}: {error!r}.") from error
    if dtype not in _ITEM_BYTES:
        raise ModelError(
            f"Tensor {name} in {file} has type {dtype}, which is not supported; known: {', '.join(_ITEM_BYTES)}."
        )
    if not whole or end - begin != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise ModelError(
            f"The header of {file} is damaged: tensor {name} of shape {list(shape)} and type {dtype} "
            f"cannot lie at bytes {begin} to {end}."
        )
    return TensorEntry(file, name, dtype, shape, data_start + begin, end - begin)


def read_tensors(file: Path, entries: list[TensorEntry]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on the host) for `entries` of `file`, each in memory of its own."""
    import torch

    from llmkit.recycled_memory import passing_tensor

    dtypes = {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
        "BOOL": torch.bool,
    }  # fmt: skip
    with file.open("rb", buffering=0) as stream:
        for entry in entries:
            tensor = passing_tensor(entry.shape, dtypes[entry.dtype])
            if entry.nbytes:
                stream.seek(entry.start)
                _read_into(stream, entry, tensor.view(-1).view(torch.uint8).numpy().data)
            yield entry.name, tensor
            del tensor  # the caller's reference must be the only one while the next tensor is read


def _read_into(stream: Any, entry: TensorEntry, buffer: memoryview) -> None:
    done = 0
    while done < entry.nbytes:
        count = stream.readinto(buffer[done:])  # one call reads at most about 2 GiB
        if not count:
            raise ModelError(f"{entry.file} ended while tensor {entry.name} was read; was it changed meanwhile?")
        done += count
