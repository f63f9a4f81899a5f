"""Front door of `mistral`: calls after `[TOOL_CALLS]`, as a list of objects or name by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from llmkit.hookspecs import PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmkit.hookspecs.tool_parser import ToolFormat


class MistralOptions(BaseModel):
    """Options of `mistral`."""

    model_config = ConfigDict(extra="forbid")

    layout: Literal["list", "named"] = Field(
        "list",
        description="What a model is made to write with tool_choice required or a name: a list of objects, or name and "
        "arguments of each call (tokenizers from v11 on). Both are read.",
    )


info = PluginInfo(summary="lists of JSON objects, or names with arguments, after [TOOL_CALLS]", options=MistralOptions)


@hookimpl
def llmkit_tool_format_fits(chat_template: str) -> bool:
    return "[TOOL_CALLS]" in chat_template


@hookimpl
def llmkit_tool_format(options: MistralOptions) -> ToolFormat:
    from llmkit_tool_parsers.mistral_format import MistralFormat

    return MistralFormat(options.layout)
