"""The container GGUF: header, metadata and tensor table of a file, and the raw bytes of a tensor.

Read here and not through `gguf.GGUFReader`, which builds arrays for every one of the hundreds of thousands of strings
of a vocabulary (about 3 seconds for 49 152 tokens); arrays are skipped here and decoded when asked for. Layout after
the GGUF specification, versions 2 and 3: magic, version, counts; key-value pairs; tensor table; aligned tensor data.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmkit.errors import ModelError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# GGUF value type → struct code.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor: `shape` outermost dimension first (the file has it innermost first), `start` of its bytes in the
    file; `type_name` as in `gguf.GGMLQuantizationType`."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class _Array:
    """An array in the metadata: where its first item is, what the items are, how many."""

    position: int
    item_type: int
    count: int


class GgufFile:
    """The header of one file. Raises ModelError if it is damaged, cut short, split or of another byte order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as stream:
                self._data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"{path} cannot be read as a GGUF file: {error}.") from error
        self._position = 0
        self._values: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._read()
        except (struct.error, IndexError) as error:
            raise ModelError(
                f"{path} is cut short: it ends at byte {len(self._data)}, inside its header.", hint="Fetch it again."
            ) from error

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; an array as a list, decoded at each call."""
        value = self._values.get(key, default)
        return list(self._items(value)) if isinstance(value, _Array) else value

    def has(self, key: str) -> bool:
        return key in self._values

    def length(self, key: str) -> int | None:
        """How many items the array `key` has; None if there is no such array."""
        value = self._values.get(key)
        return value.count if isinstance(value, _Array) else None

    def _read(self) -> None:
        self._check_version()
        tensor_count, value_count = self._scalar(_U64), self._scalar(_U64)
        for _ in range(value_count):
            key = self._string()
            if key in self._values:
                raise ModelError(f"{self.path} lists the metadata key {key} twice.")
            self._values[key] = self._value(self._scalar(_U32), key)
        parts = self._values.get("split.count", 0)
        if parts > 1:
            raise ModelError(
                f"{self.path} is part {self._values.get('split.no', 0) + 1} of {parts} of a split model, "
                "which is not supported.",
                hint="Join the parts with llama.cpp's llama-gguf-split --merge.",
            )
        self._read_tensor_table(tensor_count)

    def _check_version(self) -> None:
        if self._data[:4] != MAGIC:
            raise ModelError(f"{self.path} is not a GGUF file: it does not begin with the letters GGUF.")
        self._position = 4
        version = self._scalar(_U32)
        if version & 0xFFFF == 0:
            raise ModelError(
                f"{self.path} is a big-endian GGUF file, which is not supported.",
                hint="Convert it with gguf-convert-endian FILE little.",
            )
        if version not in _VERSIONS:
            raise ModelError(f"{self.path} has GGUF version {version}; supported are 2 and 3.")

    def _read_tensor_table(self, count: int) -> None:
        rows = []
        for _ in range(count):
            name = self._string()
            dimensions = self._scalar(_U32)
            shape = tuple(reversed([self._scalar(_U64) for _ in range(dimensions)]))
            rows.append((name, shape, self._scalar(_U32), self._scalar(_U64)))
        alignment = self._values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self.path} is damaged: general.alignment is {alignment!r}.")
        data_start = -(-self._position // alignment) * alignment
        for name, shape, type_number, offset in rows:
            if name in self.tensors:
                raise ModelError(f"{self.path} lists tensor {name} twice.")
            type_name, nbytes = self._storage(name, shape, type_number)
            end = data_start + offset + nbytes
            if end > len(self._data):
                raise ModelError(
                    f"{self.path} is cut short: tensor {name} ends at byte {end}, the file has {len(self._data)}.",
                    hint="Fetch it again.",
                )
            self.tensors[name] = GgufTensor(name, type_name, shape, data_start + offset, nbytes)

    def _storage(self, name: str, shape: tuple[int, ...], type_number: int) -> tuple[str, int]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            tensor_type = GGMLQuantizationType(type_number)
        except ValueError as error:
            raise ModelError(
                f"Tensor {name} in {self.path} has type {type_number}, which the installed gguf package does not know."
            ) from error
        block_size, block_bytes = GGML_QUANT_SIZES[tensor_type]
        if shape and shape[-1] % block_size:
            raise ModelError(
                f"Tensor {name} in {self.path} has rows of {shape[-1]}, no multiple of {tensor_type.name}'s "
                f"block of {block_size}."
            )
        return tensor_type.name, math.prod(shape) // block_size * block_bytes

    def _scalar(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self._data, self._position)
        self._position += form.size
        return value

    def _string(self) -> str:
        raw = self._raw_string()
        return raw.decode("utf-8", errors="replace")

    def _raw_string(self) -> bytes:
        length = self._scalar(_U64)
        end = self._position + length
        if end > len(self._data):
            raise IndexError(end)
        raw = self._data[self._position : end]
        self._position = end
        return raw

    def _value(self, value_type: int, key: str) -> Any:
        if value_type == _STRING:
            return self._string()
        if value_type == _ARRAY:
            return self._skip_array(key)
        return self._scalar(struct.Struct("<" + self._code(value_type, key)))

    def _code(self, value_type: int, key: str) -> str:
        if value_type not in _SCALARS:
            raise ModelError(f"{self.path} is damaged: metadata key {key} has the unknown type {value_type}.")
        return _SCALARS[value_type]

    def _skip_array(self, key: str) -> _Array:
        item_type, count = self._scalar(_U32), self._scalar(_U64)
        array = _Array(self._position, item_type, count)
        if item_type == _STRING:
            self._position = self._after_strings(count)
        else:
            self._position += count * struct.calcsize("<" + self._code(item_type, key))
        if self._position > len(self._data):
            raise IndexError(self._position)
        return array

    def _after_strings(self, count: int) -> int:
        data, position, unpack, size = self._data, self._position, _U64.unpack_from, len(self._data)
        for _ in range(count):
            position += 8 + unpack(data, position)[0]
            if position > size:  # beyond 2**63, unpacking would raise another error
                raise IndexError(position)
        return position

    def _items(self, array: _Array) -> Iterator[Any]:
        if array.item_type != _STRING:
            yield from struct.unpack_from(f"<{array.count}{_SCALARS[array.item_type]}", self._data, array.position)
            return
        data, position, unpack = self._data, array.position, _U64.unpack_from
        for _ in range(array.count):
            start = position + 8
            position = start + unpack(data, position)[0]
            yield data[start:position].decode("utf-8", errors="replace")
