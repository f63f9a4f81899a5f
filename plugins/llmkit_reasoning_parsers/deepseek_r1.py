"""Front door of `deepseek-r1`: every answer begins with reasoning, up to `</think>`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.hookspecs import PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmkit.hookspecs.reasoning_parser import ReasoningFormat

info = PluginInfo(summary="reasoning up to </think>, whether or not the answer begins with <think>: DeepSeek R1, QwQ")


@hookimpl
def llmkit_reasoning_format_fits(chat_template: str) -> bool:
    # The bars are fullwidth ones, which no other family has.
    return "</think>" in chat_template and "<｜Assistant｜>" in chat_template


@hookimpl
def llmkit_reasoning_format() -> ReasoningFormat:
    from llmkit_reasoning_parsers.think_tags import ThinkTags

    return ThinkTags(always=True)
