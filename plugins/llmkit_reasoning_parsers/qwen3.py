"""Front door of `qwen3`: reasoning between `<think>` and `</think>`, if the answer or the prompt opens it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.hookspecs import PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmkit.hookspecs.reasoning_parser import ReasoningFormat

info = PluginInfo(summary="reasoning between <think> and </think>, where it is opened: Qwen 3 and other hybrids")


@hookimpl
def llmkit_reasoning_format_fits(chat_template: str) -> bool:
    return all(mark in chat_template for mark in ("<think>", "</think>", "<|im_start|>"))


@hookimpl
def llmkit_reasoning_format() -> ReasoningFormat:
    from llmkit_reasoning_parsers.think_tags import ThinkTags

    return ThinkTags(always=False)
