"""Front door of `qwen`: functions and parameters as tags (Qwen3-Coder)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.hookspecs import PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmkit.hookspecs.tool_parser import ToolFormat

info = PluginInfo(summary="<function=NAME> with <parameter=NAME> tags: Qwen3-Coder and relatives")


@hookimpl
def llmkit_tool_format_fits(chat_template: str) -> bool:
    return "<function=" in chat_template and "<parameter=" in chat_template


@hookimpl
def llmkit_tool_format() -> ToolFormat:
    from llmkit_tool_parsers.qwen_format import QwenFormat

    return QwenFormat()
