"""Where a model comes from: its files, format, configuration and architecture."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmkit.hookspecs.weights import WeightsFormat


@dataclass(frozen=True)
class ModelSource:
    """A model that has been found. `config` has the keys of a Hugging Face config.json, overrides applied;
    `architecture` is the name that the model plugin is looked up by."""

    path: Path
    format_name: str
    format: WeightsFormat
    config: dict[str, Any]
    architecture: str
    generation_config: dict[str, Any] = field(default_factory=dict)
