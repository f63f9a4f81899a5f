"""Rotary position parameters, wherever a `config.json` keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmkit.errors import ModelError
from llmkit.layers.config_reader import ConfigReader

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
DEFAULT_THETA = 10_000.0


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of one rotary embedding.

    rotary_dim: rotated elements of a head, even. original_length: context length of the pre-training, in tokens.
    factor: by how much it was stretched. The rest belongs to single types, see `llmkit.layers.rotary`.
    """

    rotary_dim: int
    original_length: int
    rope_type: str = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def read_rope(raw: Mapping[str, Any], head_dim: int, max_position_embeddings: int) -> RopeConfig:
    """Rope parameters of a configuration, in either of the two forms that Hugging Face writes.

    transformers 5 has one object `rope_parameters` that includes `rope_theta`; before, `rope_theta` stood at the
    top level and `rope_scaling` held the rest. Both may be mixed: theta is looked for in the object first, then at
    the top level, then it is 10000. Raises ModelError.
    """
    top = ConfigReader(raw)
    key = "rope_scaling" if top.mapping("rope_scaling") else "rope_parameters"
    values = top.mapping(key)
    _refuse_nested(key, values)
    rope = ConfigReader(values, f"{key}.")
    type_key = "rope_type" if rope.has("rope_type") else "type"
    rope_type = rope.text(type_key, "default", ROPE_TYPES)
    theta = rope.number("rope_theta") if rope.has("rope_theta") else top.number_or("rope_theta", DEFAULT_THETA)
    fraction_from = rope if rope.has("partial_rotary_factor") else top
    rotary_dim = int(head_dim * fraction_from.number_or("partial_rotary_factor", 1.0))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ModelError(
            f"The model's config.json asks for {rotary_dim} rotated elements of a head of {head_dim}; it must be an "
            "even number up to the head's size (keys head_dim and partial_rotary_factor)."
        )
    original = top.optional_integer("original_max_position_embeddings")
    if original is None:
        original = rope.integer_or("original_max_position_embeddings", max_position_embeddings)
    factor = rope.optional_number("factor")
    if factor is None:
        if rope_type in ("linear", "dynamic", "llama3"):
            raise rope.missing("factor")
        factor = max_position_embeddings / original if rope_type == "yarn" else 1.0
    if rope_type == "llama3":
        for needed in ("low_freq_factor", "high_freq_factor"):
            rope.number(needed)
    return RopeConfig(
        rotary_dim=rotary_dim,
        original_length=original,
        rope_type=rope_type,
        theta=theta,
        factor=factor,
        low_freq_factor=rope.number_or("low_freq_factor", 1.0),
        high_freq_factor=rope.number_or("high_freq_factor", 4.0),
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=rope.number_or("beta_fast", 32.0),
        beta_slow=rope.number_or("beta_slow", 1.0),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.boolean("truncate", True),
    )


def _refuse_nested(key: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, Mapping):
            raise ModelError(
                f"The model's config.json has {key}.{name}, rotary parameters that differ by kind of layer; "
                "this is not supported."
            )
