"""Front door of `pythonic`: a list of calls in Python's notation (Llama 4, Llama 3.2, ToolACE)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from llmkit.hookspecs import PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmkit.hookspecs.tool_parser import ToolFormat

info = PluginInfo(summary="a list of calls in Python's notation: Llama 4, ToolACE and others")

_SHOWN = re.compile(r"\[func_name1\(params_name1=params_value1")


@hookimpl
def llmkit_tool_format_fits(chat_template: str) -> bool:
    return _SHOWN.search(chat_template) is not None


@hookimpl
def llmkit_tool_format() -> ToolFormat:
    from llmkit_tool_parsers.pythonic_format import PythonicFormat

    return PythonicFormat()
