"""What a `$ref` of JSON schema points to, within the schema itself."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from llmkit_structured.schema_refusal import refuse

_NO_SCHEMAS = frozenset({"enum", "const", "default", "example", "examples"})


class References:
    """Looks up references in one schema document."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._id = root.get("$id", "") if isinstance(root, dict) else ""
        self._anchors: dict[str, tuple[str, Any]] | None = None

    def resolve(self, target: Any, place: str) -> tuple[str, Any]:
        """Name (a JSON pointer) and subschema of `target`. Raises UnsupportedSchema: outside of the document, or
        leading nowhere."""
        if not isinstance(target, str):
            refuse(place, "$ref must be a text")
        fragment = target
        if isinstance(self._id, str) and self._id and target.startswith(self._id):
            fragment = target[len(self._id) :] or "#"
        if not fragment.startswith("#"):
            refuse(place, f"$ref to {target[:80]!r}, which is outside of the schema")
        pointer = unquote(fragment[1:])
        if pointer and not pointer.startswith("/"):
            return self._anchor(pointer, place)
        found, name = self._root, "#"
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            name += f"/{part}"
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                refuse(place, f"$ref to {target[:80]!r}, which is not there")
            if isinstance(found, dict) and isinstance(found.get("$id"), str):
                refuse(place, "$ref into a schema with an identity of its own")
        return name, found

    def _anchor(self, name: str, place: str) -> tuple[str, Any]:
        if self._anchors is None:
            self._anchors = {}
            self._collect(self._root, "#")
        if name not in self._anchors:
            refuse(place, f"$ref to the anchor {name[:80]!r}, which is not there")
        return self._anchors[name]

    def _collect(self, schema: Any, path: str) -> None:
        assert self._anchors is not None
        stack = [(schema, path)]
        while stack:
            value, at = stack.pop()
            if isinstance(value, dict):
                if at != "#" and isinstance(value.get("$id"), str):
                    continue
                for keyword in ("$anchor", "$dynamicAnchor"):
                    if isinstance(value.get(keyword), str):
                        self._anchors.setdefault(value[keyword], (at, value))
                stack.extend((v, f"{at}/{k}") for k, v in value.items() if k not in _NO_SCHEMAS)
            elif isinstance(value, list):
                stack.extend((v, f"{at}/{i}") for i, v in enumerate(value))
