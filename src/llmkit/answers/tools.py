"""The tools of a request, in the form of OpenAI's API, checked and looked into."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmkit.errors import InvalidRequestError, shown

MAX_TOOLS = 1024

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def function_tools(tools: Any) -> list[dict[str, Any]]:
    """`tools` of a request's body as a list of functions with names. Raises InvalidRequestError (param "tools")."""
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise _refused(f"tools must be a list, got {shown(tools)}")
    if len(tools) > MAX_TOOLS:
        raise _refused(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are allowed")
    names: set[str] = set()
    for i, tool in enumerate(tools):
        name = _checked_name(tool, f"tools[{i}]")
        if name in names:
            raise _refused(f"tools[{i}].function.name is {name!r}, as that of another tool")
        names.add(name)
    return [dict(tool) for tool in tools]


def _checked_name(tool: Any, where: str) -> str:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise _refused(f'{where} must be an object of type "function", got {shown(tool)}')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _refused(f"{where}.function must be an object with a name, got {shown(function)}")
    name = function.get("name")
    # Names stand in prompts and grammars; whatever else they hold could be taken for a part of the format.
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in ("auto", "required", "none"):
        raise _refused(
            f"{where}.function.name must have 1 to 128 letters, digits, dots, dashes or underscores and be none of "
            f"auto, required, none; got {shown(name)}"
        )
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise _refused(f"{where}.function.parameters must be a JSON schema, an object")
    if not isinstance(function.get("strict"), bool | None):
        raise _refused(f"{where}.function.strict must be true or false")
    return name


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{message}.", param="tools")


def tool_names(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The names of checked tools."""
    return frozenset(tool["function"]["name"] for tool in tools)


def parameters_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a tool's arguments. Without parameters it takes none."""
    given = tool["function"].get("parameters")
    return dict(given) if given else {"type": "object", "properties": {}, "additionalProperties": False}


def is_strict(tool: Mapping[str, Any]) -> bool:
    """Whether its arguments must meet the schema also where the model chooses freely."""
    return bool(tool["function"].get("strict"))
