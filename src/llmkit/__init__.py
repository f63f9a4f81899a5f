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
        EngineError,
        InvalidRequestError,
        LlmkitError,
        ModelError,
        OutOfMemoryError,
        PluginError,
    )
    from llmkit.frontend.llm import LLM
    from llmkit.frontend.prompts import RequestOptions
    from llmkit.hookspecs import Environment, PluginInfo, hookimpl
    from llmkit.registry import Registry
    from llmkit.requests.logprobs import PositionLogprobs
    from llmkit.requests.output import CompletionOutput, RequestOutput
    from llmkit.requests.sampling_params import OutputKind, SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "CompletionOutput": "llmkit.requests.output",
    "ConfigError": "llmkit.errors",
    "EngineClosedError": "llmkit.errors",
    "EngineConfig": "llmkit.config",
    "EngineError": "llmkit.errors",
    "Environment": "llmkit.hookspecs",
    "InvalidRequestError": "llmkit.errors",
    "LLM": "llmkit.frontend.llm",
    "LlmkitError": "llmkit.errors",
    "ModelError": "llmkit.errors",
    "OutOfMemoryError": "llmkit.errors",
    "OutputKind": "llmkit.requests.sampling_params",
    "PluginError": "llmkit.errors",
    "PluginInfo": "llmkit.hookspecs",
    "PositionLogprobs": "llmkit.requests.logprobs",
    "Registry": "llmkit.registry",
    "RequestOptions": "llmkit.frontend.prompts",
    "RequestOutput": "llmkit.requests.output",
    "SamplingParams": "llmkit.requests.sampling_params",
    "hookimpl": "llmkit.hookspecs",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "ConfigError",
    "EngineClosedError",
    "EngineConfig",
    "EngineError",
    "Environment",
    "InvalidRequestError",
    "LlmkitError",
    "ModelError",
    "OutOfMemoryError",
    "OutputKind",
    "PluginError",
    "PluginInfo",
    "PositionLogprobs",
    "Registry",
    "RequestOptions",
    "RequestOutput",
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
