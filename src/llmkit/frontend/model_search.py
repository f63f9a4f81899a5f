"""From what a user typed to a path, and what to say when there is none."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from llmkit.errors import ModelError, shown
from llmkit.frontend import model_store

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHOWN = 8


def find_model(name: str) -> Path:
    """The folder or file that `name` means: a path that exists, else a name in the llmkit cache. An empty folder does
    not hide the model of its name.

    Raises ModelError saying what there is instead."""
    try:
        path = _find(name)
        special = not path.is_dir() and not path.is_file()
    except OSError as error:
        raise ModelError(f"The model {shown(name, 200)} cannot be read: {error.strerror}.") from error
    except (ValueError, RuntimeError) as error:  # a null character; a home of nobody
        raise ModelError(f"The model {shown(name, 200)} cannot be read: {error}.") from error
    if special:
        raise ModelError(f"{path} is neither a folder nor a file with a model in it.")
    return path


def _find(name: str) -> Path:
    path = Path(name).expanduser()
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        return path
    found = model_store.installed()
    if path.exists() and name not in found:
        return path
    if name in found:
        return found[name]
    if name in model_store.CATALOGUE:
        raise ModelError(
            f"The model {name} is known but has not been fetched.", hint=f"Fetch it with: llmkit models pull {name}"
        )
    if _looks_like_path(name):
        raise _missing_path(path)
    raise _unknown_name(name, [*found, *(known for known in model_store.CATALOGUE if known not in found)])


def unrecognised_model(path: Path) -> ModelError:
    """Why no format reads `path`, which exists."""
    try:
        names = [path.name] if path.is_file() else sorted(entry.name for entry in path.iterdir())
        if path.is_file():
            path.open("rb").close()
    except OSError as error:
        return ModelError(f"{path} cannot be read: {error.strerror}.")
    pickles = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
    if pickles:
        return ModelError(
            f"{path} has weights only in pickle files ({', '.join(pickles[:3])}), which are never opened because "
            "unpickling runs code.",
            hint="Use a copy in safetensors or GGUF format.",
        )
    hint = "A model is a folder with config.json and .safetensors files, or a GGUF file."
    if path.is_file():
        return ModelError(f"{path} is in no model format that is installed.", hint=hint)
    inside = _listed(names) if names else "nothing"
    return ModelError(f"{path} holds no model that can be read; in it: {inside}.", hint=hint)


def _looks_like_path(name: str) -> bool:
    has_suffix = name.endswith((".gguf", ".safetensors", ".json", *_PICKLE_SUFFIXES))
    return os.sep in name or "/" in name or name.startswith((".", "~")) or has_suffix


def _missing_path(path: Path) -> ModelError:
    parent = path.absolute().parent
    while not parent.is_dir():
        parent = parent.parent
    hint = (
        "Nothing is fetched from model hubs: download the model first, then give its folder. "
        f"Models that can be fetched by name: {', '.join(model_store.CATALOGUE)}."
    )
    if parent != path.absolute().parent:
        return ModelError(f"The model path {path} does not exist, nor does {path.parent}.", hint=hint)
    names = sorted(entry.name for entry in parent.iterdir() if not entry.name.startswith("."))
    near = difflib.get_close_matches(path.name, names, n=3)
    what = f"did you mean {' or '.join(near)}?" if near else f"{parent} has {_listed(names) or 'nothing'}."
    return ModelError(f"The model path {path} does not exist; {what}", hint=hint)


def _unknown_name(name: str, known: list[str]) -> ModelError:
    near = difflib.get_close_matches(name, known, n=3)
    what = f"did you mean {' or '.join(near)}?" if near else f"known names: {', '.join(known)}."
    return ModelError(
        f"There is no file, folder or model named {name!r}; {what}",
        hint="`llmkit models list` shows the names, `llmkit models pull NAME` fetches one.",
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
