"""What a model's own files say about generation: when to stop, and how to sample unless asked otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmkit.errors import InvalidRequestError, ModelError
from llmkit.requests.sampling_params import SamplingParams

_TAKEN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def end_of_sequence_ids(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    tokenizer_eos: int | None,
    vocab_size: int,
) -> frozenset[int]:
    """Every id that ends an answer: generation_config.json's (several are allowed), config.json's if that names
    none, and the tokenizer's. Ids beyond the vocabulary cannot be sampled and are left out."""
    listed = _ids(generation_config.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    if tokenizer_eos is not None:
        listed.append(tokenizer_eos)
    return frozenset(token_id for token_id in listed if 0 <= token_id < vocab_size)


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    values = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
        raise ModelError(f"eos_token_id must be an id or a list of ids, got {value!r}.")
    return list(values)


def default_sampling_params(generation_config: Mapping[str, Any], overrides: Mapping[str, Any]) -> SamplingParams:
    """generation_config.json's temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens, where it
    has them, else SamplingParams' own defaults; `overrides` win.

    Raises ModelError if the model's file holds a bad value, InvalidRequestError if `overrides` do.
    """
    taken = {name: generation_config[name] for name in _TAKEN if generation_config.get(name) is not None}
    if generation_config.get("max_new_tokens") is not None:
        taken["max_tokens"] = generation_config["max_new_tokens"]
    try:
        SamplingParams(**taken)
    except InvalidRequestError as error:
        raise ModelError(
            f"The model's generation_config.json has a bad value: {error}",
            hint="Set model.generation_config to false to ignore it.",
        ) from error
    unknown = [name for name in overrides if name not in SamplingParams.__struct_fields__]
    if unknown:
        raise InvalidRequestError(
            f"SamplingParams has no field {', '.join(unknown)}; known: {', '.join(SamplingParams.__struct_fields__)}.",
            param=unknown[0],
        )
    return SamplingParams(**{**taken, **overrides})
