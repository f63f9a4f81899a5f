"""Front door of `hermes`: JSON objects between `<tool_call>` and `</tool_call>` (Hermes, Qwen 2.5 and 3, others)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from llmkit.hookspecs import PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmkit.hookspecs.tool_parser import ToolFormat

info = PluginInfo(summary="JSON objects between <tool_call> and </tool_call>: Hermes, Qwen 2.5, Qwen 3 and others")

# In the source of a template the line break and the quotes may be escaped.
_SHOWN = re.compile(r"""<tool_call>(?:\\n|\s)*\{+\s*\\?["'](?:name|arguments)""")


@hookimpl
def llmkit_tool_format_fits(chat_template: str) -> bool:
    return _SHOWN.search(chat_template) is not None and "<function=" not in chat_template


@hookimpl
def llmkit_tool_format() -> ToolFormat:
    from llmkit_tool_parsers.hermes_format import HermesFormat

    return HermesFormat()
