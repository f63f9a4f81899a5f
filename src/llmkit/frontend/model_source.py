"""Where a model comes from: its files, format, configuration and architecture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmkit.errors import ConfigError, ModelError, PluginError
from llmkit.frontend.model_choice import choose_model_plugin, translated_config
from llmkit.frontend.model_search import find_model, unrecognised_model

if TYPE_CHECKING:
    import torch

    from llmkit.config import EngineConfig
    from llmkit.frontend.tokenizer import Tokenizer
    from llmkit.hookspecs.attention import Support
    from llmkit.hookspecs.plugin import Environment
    from llmkit.hookspecs.weights import WeightsFormat
    from llmkit.registry import Registry


@dataclass(frozen=True)
class ModelSource:
    """A model that has been found.

    config: keys of a Hugging Face config.json as the core reads them, overrides applied; file_config: the same as the
    model has them, where its plugin has translated them. architecture: what the model says it is. plugin: the model
    plugin for it, None for the one called by the architecture; plugin_reason: why that one. path: `Path()` for a model
    that is made of overrides alone.
    """

    path: Path
    format_name: str
    format: WeightsFormat
    config: dict[str, Any]
    architecture: str
    generation_config: dict[str, Any] = field(default_factory=dict)
    file_config: dict[str, Any] | None = None
    plugin: str | None = None
    plugin_reason: str = "the architecture that config.json names"

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's tensors, as its format gives them."""
        return self.format.tensors(self.path, self.config if self.file_config is None else self.file_config)

    def stored_types(self) -> Mapping[str, frozenset[str]]:
        """In which types the files hold the matrices of each role, as far as their format knows."""
        return self.format.stored_types(self.path)


def resolve_model(config: EngineConfig, registry: Registry, environment: Environment | None = None) -> ModelSource:
    """Find the model that `config.model` names, choose the format plugin and read the model's configuration.

    Reads no weights. Raises ModelError if there is no such model, no format reads it, or no model plugin is for its
    architecture; PluginError if the format that was asked for cannot be used."""
    from llmkit.hookspecs.plugin import Environment

    model = config.model
    environment = environment or Environment()
    if not model.model:
        return _resolve_without_files(config, registry, environment)
    path = find_model(model.model)
    reader, name = _choose_format(model.load_format, path, model.seed, registry, environment)
    found = ModelSource(
        path=path,
        format_name=name,
        format=reader,
        config=reader.config(path) | model.overrides,
        architecture="",
        generation_config=reader.generation_config(path) if model.generation_config else {},
    )
    return _with_plugin(found, model.implementation, registry, environment, str(path))


def _resolve_without_files(config: EngineConfig, registry: Registry, environment: Environment) -> ModelSource:
    model = config.model
    hint = "Give a folder, a GGUF file, or a name from `llmkit models list`."
    if model.load_format == "auto":
        raise ConfigError("No model is given.", hint=hint)
    reader: WeightsFormat = registry.create("weights", model.load_format, environment, seed=model.seed)
    if reader.needs_files:
        raise ModelError(f"No model is given, and load_format {model.load_format} reads files.", hint=hint)
    if not model.overrides:
        raise ModelError("No model is given, and model.overrides does not describe one.", hint=hint)
    found = ModelSource(Path(), model.load_format, reader, dict(model.overrides), architecture="")
    return _with_plugin(found, model.implementation, registry, environment, "model.overrides")


def _with_plugin(
    found: ModelSource, choice: str, registry: Registry, environment: Environment, where: str
) -> ModelSource:
    """`found` with its architecture and the plugin that runs it, and its configuration as the core reads it."""
    chosen = choose_model_plugin(choice, found.config, registry, environment, where)
    translated = translated_config(chosen.plugin, found.config, registry)
    return replace(
        found,
        config=found.config if translated is None else translated,
        file_config=None if translated is None else found.config,
        architecture=chosen.architecture,
        plugin=chosen.plugin,
        plugin_reason=chosen.reason,
    )


def _choose_format(
    choice: str, path: Path, seed: int, registry: Registry, environment: Environment
) -> tuple[WeightsFormat, str]:
    """The reader for `path` and its name; with "auto", the one that recognises the files."""
    from llmkit.hookspecs.attention import Support

    def judge(candidate: WeightsFormat) -> Support:
        if candidate.recognises(path):
            return Support(score=1, grounds=f"{path.name} is in this format")
        return Support(reasons=(f"{path} is not in this format",))

    try:
        reader: WeightsFormat = registry.create("weights", choice, environment, judge=judge, seed=seed)
    except PluginError as error:
        if choice == "auto":
            raise unrecognised_model(path) from error
        raise
    return reader, registry.selections[-1].name


def load_tokenizer(
    source: ModelSource,
    config: EngineConfig,
    registry: Registry | None = None,
    environment: Environment | None = None,
) -> Tokenizer | None:
    """The tokenizer of `source`, or the one `model.tokenizer` names; None if there is none or none is wanted.

    With `registry`, `model.tokenizer` may be anything that a model may be; without, a folder with tokenizer.json,
    such a file, or what the source's own format reads. Raises ModelError."""
    model = config.model
    if model.skip_tokenizer:
        return None
    if model.tokenizer is None:
        return source.format.tokenizer(source.path) if source.path != Path() else None
    path = find_model(model.tokenizer)
    tokenizer = _tokenizer_at(path, source.format, registry, environment)
    if tokenizer is None:
        raise ModelError(f"{path}, given as the tokenizer, has no tokenizer in it.")
    return tokenizer


def _tokenizer_at(
    path: Path, own_format: WeightsFormat, registry: Registry | None, environment: Environment | None
) -> Tokenizer | None:
    from llmkit.frontend.tokenizers_hf import load_hf_tokenizer
    from llmkit.hookspecs.plugin import Environment

    if (path.is_dir() or path.suffix == ".json") and (tokenizer := load_hf_tokenizer(path)) is not None:
        return tokenizer
    if own_format.recognises(path) or registry is None:
        return own_format.tokenizer(path)
    reader, _ = _choose_format("auto", path, 0, registry, environment or Environment())
    return reader.tokenizer(path)
