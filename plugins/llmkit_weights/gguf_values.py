"""The values of GGUF tensors: read from the file, dequantised by the gguf package, rows put in checkpoint order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from llmkit.errors import ModelError
from llmkit.recycled_memory import passing_array
from llmkit_weights.gguf_architectures import architecture_of, norm_offset
from llmkit_weights.gguf_file import GgufFile, GgufTensor
from llmkit_weights.gguf_names import checkpoint_name, is_derived

if TYPE_CHECKING:
    import torch

_Array = np.ndarray[Any, np.dtype[Any]]
# Blocks given to gguf's dequantisation at once: enough that Python's share vanishes, few enough that its
# intermediates stay in the cache (measured on Q4_1: a third of the time of whole rows in groups of 16) and are so
# small, 512 KiB in float32, that they come from the heap and not each from the system.
_CHUNK_BLOCKS = 4096


def read_tensors(file: GgufFile, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """(checkpoint name, tensor on the host) for every parameter in `file`: F32, F16 and BF16 as they are, quantised
    types as float32; stacks of experts one expert at a time. Raises ModelError for a tensor that the architecture does
    not have."""
    architecture = architecture_of(file) or ""
    permuted_heads = _permuted_heads(file, config)
    offset = norm_offset(architecture)
    with file.path.open("rb", buffering=0) as stream:
        for tensor in file.tensors.values():
            if is_derived(tensor.name):
                continue
            name = checkpoint_name(tensor.name, architecture)
            if name is None:
                raise ModelError(f"{file.path} has the tensor {tensor.name}, which no known architecture has.")
            raw = _read_raw(file, tensor, stream)
            if "{expert}" in name:
                for expert, rows in enumerate(raw):
                    yield name.format(expert=expert), _values(file, tensor, rows, tensor.shape[1:])
                continue
            heads = permuted_heads.get(name.rsplit(".", 2)[-2])
            if heads is not None:
                raw = _unpermute_rows(raw, heads)
            values = _values(file, tensor, raw, tensor.shape)
            del raw
            yield name, values - offset if offset and name.endswith("norm.weight") else values
            del values


def _values(file: GgufFile, tensor: GgufTensor, raw: _Array, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    result = torch.from_numpy(_dequantise(file, tensor, raw, shape))
    return result.view(torch.bfloat16) if tensor.type_name == "BF16" else result


def read_array(file: GgufFile, tensor: GgufTensor) -> _Array:
    """One tensor's values, float32 or float16 (BF16 as its bits in int16), in the order of the file."""
    with file.path.open("rb", buffering=0) as stream:
        return _dequantise(file, tensor, _read_raw(file, tensor, stream), tensor.shape)


def yielded_bytes(tensor: GgufTensor) -> int:
    """Bytes of the tensor that `read_tensors` makes of `tensor`."""
    return math.prod(tensor.shape) * (2 if tensor.type_name in ("F16", "BF16") else 4)


def _read_raw(file: GgufFile, tensor: GgufTensor, stream: Any) -> _Array:
    """The bytes of `tensor` as uint8 [rows, bytes of a row]."""
    rows = tensor.shape[0] if len(tensor.shape) > 1 else max(math.prod(tensor.shape), 1)
    raw: _Array = passing_array((tensor.nbytes,), np.uint8)
    stream.seek(tensor.start)
    buffer = raw.data
    done = 0
    while done < tensor.nbytes:
        count = stream.readinto(buffer[done:])
        if not count:
            raise ModelError(f"{file.path} ended while tensor {tensor.name} was read; was it changed meanwhile?")
        done += count
    is_matrix = len(tensor.shape) > 1 or tensor.type_name in ("F32", "F16", "BF16")
    return raw.reshape(rows if is_matrix else 1, -1)


def _permuted_heads(file: GgufFile, config: dict[str, Any]) -> dict[str, int]:
    """Modules whose rows llama.cpp's converter has reordered, and how many heads those rows belong to: it stores q
    and k of its architecture "llama" with the two halves of each head interleaved, others as they are."""
    if file.get("general.architecture") != "llama":
        return {}
    return {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}


def _unpermute_rows(raw: _Array, heads: int) -> _Array:
    """Rows (0, d/2, 1, d/2+1, …) of each head back to (0, 1, …, d-1). `raw` [heads * d, bytes]; rows are whole
    blocks, so this works on quantised bytes."""
    rows, width = raw.shape
    return np.ascontiguousarray(raw.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2)).reshape(rows, width)


def _dequantise(file: GgufFile, tensor: GgufTensor, raw: _Array, shape: tuple[int, ...]) -> _Array:
    """The values of `tensor`, or those of the part of it that `raw` holds, in `shape`."""
    plain = {"F32": np.float32, "F16": np.float16, "BF16": np.int16}
    if tensor.type_name in plain:
        return raw.reshape(-1).view(plain[tensor.type_name]).reshape(shape)
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    tensor_type = GGMLQuantizationType[tensor.type_name]
    block_size, block_bytes = GGML_QUANT_SIZES[tensor_type]
    blocks = raw.reshape(-1, block_bytes)
    values: _Array = passing_array((len(blocks), block_size), np.float32)
    for start in range(0, len(blocks), _CHUNK_BLOCKS):
        chunk = blocks[start : start + _CHUNK_BLOCKS]
        try:
            # As one row: the package works through rows in groups of 16, which are far too small here.
            values[start : start + len(chunk)] = dequantize(chunk.reshape(1, -1), tensor_type).reshape(-1, block_size)
        except NotImplementedError as error:
            raise ModelError(
                f"Tensor {tensor.name} in {file.path} has type {tensor.type_name}, which cannot be dequantised."
            ) from error
    return values.reshape(shape)
