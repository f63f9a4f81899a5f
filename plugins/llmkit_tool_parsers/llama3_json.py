"""Front door of `llama3-json`: bare JSON objects with name and parameters (Llama 3.1, 3.2, 3.3)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from llmkit.hookspecs import PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmkit.hookspecs.tool_parser import ToolFormat

info = PluginInfo(summary="bare JSON objects with name and parameters, one after the other: Llama 3.1 to 3.3")

_SHOWN = re.compile(r"""\{\s*\\?"name\\?": function name, \\?"parameters\\?":""")


@hookimpl
def llmkit_tool_format_fits(chat_template: str) -> bool:
    return _SHOWN.search(chat_template) is not None


@hookimpl
def llmkit_tool_format() -> ToolFormat:
    from llmkit_tool_parsers.llama3_json_format import Llama3JsonFormat

    return Llama3JsonFormat()
