"""Reading the small JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmkit.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ModelError if it is missing, unreadable or not an object."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a JSON {type(content).__name__}, not an object.")
    return content


def read_json_if_any(path: Path) -> dict[str, Any]:
    """As `read_json`, but {} if there is no such file."""
    return read_json(path) if path.is_file() else {}
