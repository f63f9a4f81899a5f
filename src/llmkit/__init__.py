"""llmkit: build and run LLM inference engines from plugins.

Names are imported when they are first used, so that `import llmkit` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmkit.config import EngineConfig
    from llmkit.errors import (
        ConfigError,
        EngineClosedError,
        EngineDeadError,
        EngineDrainingError,
        EngineError,
        EngineOverloadedError,
        InvalidRequestError,
        LlmkitError,
        ModelError,
        OutOfMemoryError,
        PluginChoiceError,
        PluginError,
        RequestFailedError,
        RequestTimeoutError,
    )
    from llmkit.frontend.async_llm import AsyncLLM
    from llmkit.frontend.llm import LLM
    from llmkit.frontend.prompts import RequestOptions
    from llmkit.hookspecs import Environment, PluginInfo, hookimpl
    from llmkit.registry import Registry
    from llmkit.requests.logprobs import PositionLogprobs
    from llmkit.requests.output import CompletionOutput, EmbeddingOutput, RequestOutput
    from llmkit.requests.sampling_params import OutputKind, SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "llmkit.frontend.async_llm",
    "CompletionOutput": "llmkit.requests.output",
    "ConfigError": "llmkit.errors",
    "EmbeddingOutput": "llmkit.requests.output",
    "EngineClosedError": "llmkit.errors",
    "EngineConfig": "llmkit.config",
    "EngineDeadError": "llmkit.errors",
    "EngineDrainingError": "llmkit.errors",
    "EngineError": "llmkit.errors",
    "EngineOverloadedError": "llmkit.errors",
    "Environment": "llmkit.hookspecs",
    "InvalidRequestError": "llmkit.errors",
    "LLM": "llmkit.frontend.llm",
    "LlmkitError": "llmkit.errors",
    "ModelError": "llmkit.errors",
    "OutOfMemoryError": "llmkit.errors",
    "OutputKind": "llmkit.requests.sampling_params",
    "PluginChoiceError": "llmkit.errors",
    "PluginError": "llmkit.errors",
    "PluginInfo": "llmkit.hookspecs",
    "PositionLogprobs": "llmkit.requests.logprobs",
    "Registry": "llmkit.registry",
    "RequestFailedError": "llmkit.errors",
    "RequestOptions": "llmkit.frontend.prompts",
    "RequestOutput": "llmkit.requests.output",
    "RequestTimeoutError": "llmkit.errors",
    "SamplingParams": "llmkit.requests.sampling_params",
    "hookimpl": "llmkit.hookspecs",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EngineClosedError",
    "EngineConfig",
    "EngineDeadError",
    "EngineDrainingError",
    "EngineError",
    "EngineOverloadedError",
    "Environment",
    "InvalidRequestError",
    "LlmkitError",
    "ModelError",
    "OutOfMemoryError",
    "OutputKind",
    "PluginChoiceError",
    "PluginError",
    "PluginInfo",
    "PositionLogprobs",
    "Registry",
    "RequestFailedError",
    "RequestOptions",
    "RequestOutput",
    "RequestTimeoutError",
    "SamplingParams",
    "__version__",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
