"""What `LLM` and `AsyncLLM` have in common: from their arguments to a configuration and checked requests."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from llmkit.config import EngineConfig, load_config
from llmkit.errors import ConfigError, InvalidRequestError, ModelError
from llmkit.frontend.chat_template import ChatTemplate
from llmkit.frontend.generation_defaults import default_sampling_params, end_of_sequence_ids
from llmkit.frontend.input_processor import InputProcessor, ModelLimits
from llmkit.requests import validation

if TYPE_CHECKING:
    from llmkit.engine.factory import PreparedModel
    from llmkit.frontend.tokenizer import Tokenizer


def engine_config(
    model: str | os.PathLike[str] | None, config: EngineConfig | None, settings: Mapping[str, Any]
) -> EngineConfig:
    """The configuration that a constructor was given, in either of its forms. Raises ConfigError."""
    if config is not None:
        if model is not None or settings:
            raise ConfigError("give either a config, or a model and settings, not both.")
        return config
    flags = dict(settings)
    if model is not None:
        flags["model.model"] = os.fspath(model)
    return load_config(flags=flags, origin="argument").config


def input_processor(prepared: PreparedModel) -> InputProcessor:
    """What checks and tokenises the requests to a model. Raises ConfigError, ModelError."""
    config, source, tokenizer = prepared.config, prepared.source, prepared.tokenizer
    generation = source.generation_config if config.model.generation_config else {}
    vocab_size = source.config.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ModelError(f"The model's config.json needs vocab_size of at least 1, got {vocab_size!r}.")
    eos = end_of_sequence_ids(
        source.config, generation, None if tokenizer is None else tokenizer.eos_token_id, vocab_size
    )
    default_sampling_params(generation, {})  # a bad value in the model's file is a start-up error
    assert config.model.max_model_len is not None
    hidden_size = source.config.get("hidden_size")
    limits = ModelLimits(
        vocab_size,
        config.model.max_model_len,
        config.execution.max_logprobs,
        eos,
        hidden_size if isinstance(hidden_size, int) else None,
    )
    template = _chat_template(config.model.chat_template, tokenizer)
    return InputProcessor(limits, tokenizer, template, prepared.grammars, config.structured.max_whitespace)


def _chat_template(setting: str | None, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    if tokenizer is None:
        return None
    if setting is None:
        source = tokenizer.chat_template
        return None if source is None else ChatTemplate(source, tokenizer.special_tokens)
    template = ChatTemplate(_template_text(setting), tokenizer.special_tokens, "model.chat_template")
    try:
        template.compile()
    except InvalidRequestError as error:
        raise ConfigError(error.message) from error
    return template


def _template_text(setting: str) -> str:
    if "{" in setting or "\n" in setting:
        return setting
    try:
        return Path(setting).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"model.chat_template is neither Jinja text nor a file that can be read: {setting!r} ({error})."
        ) from error


def render_arguments(
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """`chat`'s arguments as `ChatTemplate.render` takes them. Raises InvalidRequestError for one of another type."""
    validation.flag("continue_final_message", continue_final_message)
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    return {
        "add_generation_prompt": validation.flag("add_generation_prompt", add_generation_prompt),
        "continue_final_message": continue_final_message,
        "tools": _mappings("tools", tools),
        "documents": _mappings("documents", documents),
        "variables": _variables(chat_template_kwargs),
    }


def _mappings(param: str, value: Any) -> Sequence[Mapping[str, Any]] | None:
    listed = isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
    if value is None or (listed and all(isinstance(item, Mapping) for item in value)):
        return cast("Sequence[Mapping[str, Any]] | None", value)
    raise validation.refuse(param, value, "a list of mappings")


def _variables(value: Any) -> Mapping[str, Any] | None:
    if value is None or (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
        return value
    raise validation.refuse("chat_template_kwargs", value, "a mapping with text keys")
