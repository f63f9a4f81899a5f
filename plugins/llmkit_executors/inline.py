"""Executor `inline`: one worker in the engine's own process and thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.hookspecs import PluginInfo, hookimpl

if TYPE_CHECKING:
    from pydantic import BaseModel

    from llmkit.hookspecs.executor import Executor

info = PluginInfo(summary="one worker in the engine's own process")


@hookimpl
def llmkit_executor(options: BaseModel | None) -> Executor:  # noqa: ARG001
    from llmkit_executors.inline_executor import InlineExecutor

    return InlineExecutor()
