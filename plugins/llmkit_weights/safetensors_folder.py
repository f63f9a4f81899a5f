"""Which safetensors files make up a model, and which tensor is in which of them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmkit.errors import ModelError
from llmkit_weights.safetensors_file import TensorEntry, read_header, reject_duplicates

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True)
class TensorFiles:
    """The files of a model, in order; `index` is tensor name → file where an index says so, else None."""

    files: tuple[Path, ...]
    index: dict[str, Path] | None = None


def find_files(path: Path) -> TensorFiles:
    """The weight files of `path`, a folder or one .safetensors file; reads the index, no weights.

    Raises ModelError naming what is missing or does not belong."""
    if path.is_file():
        return TensorFiles((path,))
    if (path / SINGLE_NAME).is_file():
        return TensorFiles((path / SINGLE_NAME,))
    if (path / INDEX_NAME).is_file():
        return _indexed_files(path)
    present = sorted(path.glob("*.safetensors"))
    if not present:
        raise _no_weights(path)
    if len(present) == 1 and not _SHARD.fullmatch(present[0].name):
        return TensorFiles((present[0],))
    return TensorFiles(_unindexed_shards(path, present))


def check_tensors(found: TensorFiles) -> dict[Path, list[TensorEntry]]:
    """Every tensor of the model by file. Reads the headers only.

    Raises ModelError naming file and tensor if one is cut off, listed twice, or not where the index says."""
    by_file: dict[Path, list[TensorEntry]] = {}
    owner: dict[str, Path] = {}
    for file in found.files:
        entries = read_header(file)
        for name in entries:
            if name in owner:
                raise ModelError(f"Tensor {name} is in both {owner[name]} and {file.name}.")
            if found.index is not None and found.index.get(name) != file:
                raise ModelError(f"Tensor {name} is in {file}, but {INDEX_NAME} does not say so.")
            owner[name] = file
        by_file[file] = list(entries.values())
    for name, file in (found.index or {}).items():
        if name not in owner:
            raise ModelError(f"{INDEX_NAME} says that tensor {name} is in {file}, but it is not.")
    return by_file


def _indexed_files(folder: Path) -> TensorFiles:
    weight_map = _read_index(folder / INDEX_NAME)
    index = {name: folder / file_name for name, file_name in weight_map.items()}
    files = tuple(sorted(set(index.values())))
    for file in files:
        if not file.is_file():
            tensor = next(name for name, owner in index.items() if owner == file)
            raise ModelError(
                f"{folder} lacks the shard {file.name}, which should hold {tensor} and others.",
                hint="Fetch the model again.",
            )
    # Other .safetensors files may lie beside the shards (consolidated.safetensors, adapters); a further numbered
    # shard, though, means that index and files come from different versions of the model.
    names = {file.name for file in files}
    families = {match[1] for name in names if (match := _SHARD.fullmatch(name))}
    for file in sorted(folder.glob("*.safetensors")):
        match = _SHARD.fullmatch(file.name)
        if match and match[1] in families and file.name not in names:
            raise ModelError(f"{file} does not belong to the model: {INDEX_NAME} puts no tensor in it.")
    return TensorFiles(files, index)


def _read_index(file: Path) -> dict[str, str]:
    try:
        content: Any = json.loads(file.read_bytes(), object_pairs_hook=lambda pairs: reject_duplicates(file, pairs))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}.") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{file} has no weight_map.")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name or len(file_name.encode()) > 255:
            raise ModelError(f"{file} puts tensor {name} in {file_name!r}, which is no file name in its folder.")
    return weight_map


def _unindexed_shards(folder: Path, present: list[Path]) -> tuple[Path, ...]:
    """A whole numbered set needs no index; anything else is ambiguous."""
    matches = [match for file in present if (match := _SHARD.fullmatch(file.name))]
    families = {(match[1], int(match[3])) for match in matches}
    if len(families) != 1:
        names = ", ".join(file.name for file in present)
        raise ModelError(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}, but several files: {names}.")
    family, count = families.pop()
    files = tuple(folder / f"{family}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1))
    for file in files:
        if not file.is_file():
            raise ModelError(f"{folder} lacks the shard {file.name}.", hint="Fetch the model again.")
    return files


def _no_weights(folder: Path) -> ModelError:
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickles:
        return ModelError(
            f"{folder} has its weights only in pickle files ({', '.join(pickles[:3])}), which are never opened "
            "because unpickling runs code.",
            hint="Use a copy in safetensors format, or convert it with transformers' "
            "save_pretrained(safe_serialization=True).",
        )
    return ModelError(f"{folder} has a config.json but no .safetensors file.")
