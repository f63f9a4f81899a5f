"""Tools of a chat request: what the model may call, in which format, and the constraint that makes it do so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmkit.answers.formats import no_tool_format
from llmkit.answers.tools import function_tools
from llmkit.requests.structured_outputs import StructuredOutputs
from llmkit_server.context import ServerContext
from llmkit_server.errors import ApiError, bad_request
from llmkit_server.limits import MAX_TOOLS
from llmkit_server.protocol.chat import ChatRequest

if TYPE_CHECKING:
    from llmkit.hookspecs.tool_parser import ToolFormat, ToolParser

Tool = dict[str, Any]


@dataclass(frozen=True)
class ToolUse:
    """What a request says about tools. choice: "none", "auto", "required" or a tool's name. tools: shown to the model;
    with "none" there are none: it is not to call any. parallel: whether there may be several calls."""

    tools: Sequence[Tool]
    choice: str
    parallel: bool
    format: ToolFormat | None

    @property
    def is_forced(self) -> bool:
        return self.choice not in ("none", "auto")

    def parser(self) -> ToolParser | None:
        """For one answer; None if it holds no calls."""
        return None if self.format is None else self.format.parser(self.tools)

    def constraint(self, given: StructuredOutputs | None) -> StructuredOutputs | None:
        """The constraint of the answer; `given`: the request's own, which goes before a free choice of tools.

        Raises ApiError if both are to be met."""
        if self.format is None:
            return given
        if given is not None:
            if self.is_forced:
                raise bad_request("A call is demanded by tool_choice, so the answer has no other form.", "tool_choice")
            return given
        return self.format.constraint(self.tools, self.choice, self.parallel)


NO_TOOLS = ToolUse((), "none", True, None)


def tool_use(server: ServerContext, body: ChatRequest) -> ToolUse:
    """Raises ApiError and InvalidRequestError for malformed tools or choices, and where no format is known."""
    if body.functions or body.function_call:
        field = "functions" if body.functions else "function_call"
        raise ApiError(501, f"{field} is not supported; use tools and tool_choice.", param=field)
    tools = [] if body.tools is None else function_tools(body.tools)
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools may hold at most {MAX_TOOLS}, got {len(tools)}.", "tools")
    choice = _choice(body.tool_choice, tools)
    if choice == "none":
        return NO_TOOLS
    if server.tool_format is None:
        raise no_tool_format(server.registry)
    return ToolUse(tools, choice, body.parallel_tool_calls is not False, server.tool_format)


def _choice(value: Any, tools: Sequence[Tool]) -> str:
    if value is None:
        return "auto" if tools else "none"
    if isinstance(value, dict):
        return _named(value, tools)
    if value not in ("none", "auto", "required"):
        raise bad_request("tool_choice must be none, auto, required or an object that names a tool.", "tool_choice")
    if not tools:
        if value == "required":
            raise bad_request("tool_choice is required, but there are no tools.", "tool_choice")
        return "none"
    return str(value)


def _named(value: dict[str, Any], tools: Sequence[Tool]) -> str:
    if value.get("type") not in ("function", None):
        raise ApiError(501, "tool_choice may only name a function.", param="tool_choice")
    function = value.get("function")
    name = function.get("name") if isinstance(function, dict) else value.get("name")
    if not isinstance(name, str):
        raise bad_request("tool_choice needs function.name.", "tool_choice")
    if name not in {tool["function"]["name"] for tool in tools}:
        raise bad_request(f"tool_choice names {name[:128]!r}, which is none of the tools.", "tool_choice")
    return name
