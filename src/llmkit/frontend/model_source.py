"""Where a model comes from: its files, format, configuration and architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmkit.errors import ModelError, PluginError
from llmkit.frontend.model_search import find_model, unrecognised_model

if TYPE_CHECKING:
    from llmkit.config import EngineConfig
    from llmkit.frontend.tokenizer import Tokenizer
    from llmkit.hookspecs.attention import Support
    from llmkit.hookspecs.plugin import Environment
    from llmkit.hookspecs.weights import WeightsFormat
    from llmkit.registry import Registry


@dataclass(frozen=True)
class ModelSource:
    """A model that has been found. `config` has the keys of a Hugging Face config.json, overrides applied;
    `architecture` is the name that the model plugin is looked up by. `path` is `Path()` for a model that is made of
    overrides alone."""

    path: Path
    format_name: str
    format: WeightsFormat
    config: dict[str, Any]
    architecture: str
    generation_config: dict[str, Any] = field(default_factory=dict)


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
    model_config = reader.config(path) | model.overrides
    return ModelSource(
        path=path,
        format_name=name,
        format=reader,
        config=model_config,
        architecture=choose_architecture(model_config, registry, str(path)),
        generation_config=reader.generation_config(path) if model.generation_config else {},
    )


def _resolve_without_files(config: EngineConfig, registry: Registry, environment: Environment) -> ModelSource:
    model = config.model
    hint = "Give a folder, a GGUF file, or a name from `llmkit models list`."
    if model.load_format == "auto":
        raise ModelError("No model is given.", hint=hint)
    reader: WeightsFormat = registry.create("weights", model.load_format, environment, seed=model.seed)
    if reader.needs_files:
        raise ModelError(f"No model is given, and load_format {model.load_format} reads files.", hint=hint)
    if not model.overrides:
        raise ModelError("No model is given, and model.overrides does not describe one.", hint=hint)
    overrides = dict(model.overrides)
    return ModelSource(
        path=Path(),
        format_name=model.load_format,
        format=reader,
        config=overrides,
        architecture=choose_architecture(overrides, registry, "model.overrides"),
    )


def _choose_format(
    choice: str, path: Path, seed: int, registry: Registry, environment: Environment
) -> tuple[WeightsFormat, str]:
    """The reader for `path` and its name; with "auto", the one that recognises the files."""
    from llmkit.hookspecs.attention import Support

    def judge(candidate: WeightsFormat) -> Support:
        if candidate.recognises(path):
            return Support(score=1)
        return Support(reasons=(f"{path} is not in this format",))

    try:
        reader: WeightsFormat = registry.create("weights", choice, environment, judge=judge, seed=seed)
    except PluginError as error:
        if choice == "auto":
            raise unrecognised_model(path) from error
        raise
    return reader, registry.selections[-1].name


def choose_architecture(config: Mapping[str, Any], registry: Registry, where: str) -> str:
    """The first of the configuration's `architectures` that a model plugin is for. `where` names the model in
    messages. Raises ModelError if there is none; code that comes with a model is never run."""
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list | tuple) or not all(isinstance(name, str) for name in architectures):
        raise ModelError(f"{where} has architectures = {architectures!r}; it must be a list of names.")
    if not architectures:
        raise ModelError(
            f"{where} does not say what architecture it is.",
            hint="Set it: --set 'model.overrides.architectures=[\"…\"]'.",
        )
    known = [row.name for row in registry.find("model")]
    for name in architectures:
        if name in known:
            return str(name)
    own_code = ", and the Python code that comes with it (auto_map) is never run" if config.get("auto_map") else ""
    raise ModelError(
        f"No model plugin is for the architecture {', '.join(architectures)} of {where}{own_code}.",
        hint=f"Known architectures: {', '.join(sorted(known)) or 'none; reinstall llmkit'}.",
    )


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
