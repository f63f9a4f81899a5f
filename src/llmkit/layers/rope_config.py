"""Rotary position parameters, wherever a `config.json` keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmkit.errors import ModelError
from llmkit.layers.config_reader import ConfigReader

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
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
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


def read_ropes(
    raw: Mapping[str, Any], head_dim: int, max_position_embeddings: int
) -> tuple[RopeConfig, dict[str, RopeConfig]]:
    """Rope parameters of a configuration, in either of the two forms that Hugging Face writes; and those by kind of
    layer, empty if all are the same.

    transformers 5 has one object `rope_parameters` that includes `rope_theta`, or one such object for every kind of
    layer; before, `rope_theta` stood at the top level and `rope_scaling` held the rest. Both may be mixed: theta is
    looked for in the object first, then at the top level, then it is 10000. `rope_local_base_freq` is the older way
    to give sliding layers a theta of their own, and no scaling. Raises ModelError.
    """
    top = ConfigReader(raw)
    key = "rope_scaling" if top.mapping("rope_scaling") else "rope_parameters"
    values = top.mapping(key)
    kinds = {name: value for name, value in values.items() if isinstance(value, Mapping)}
    if kinds and len(kinds) < len(values):
        raise top.bad(key, f"either parameters or an object for every kind of layer ({', '.join(kinds)})")
    if not kinds and top.has("rope_local_base_freq"):
        kinds = {"full_attention": values, "sliding_attention": {}}
    by_kind = {}
    for kind, value in kinds.items():
        theta_key = "rope_theta"
        if kind == "sliding_attention" and top.has("rope_local_base_freq"):
            theta_key = "rope_local_base_freq"
        rope = ConfigReader(value, f"{key}.{kind}.")
        by_kind[kind] = _read_rope(top, rope, head_dim, max_position_embeddings, theta_key)
    if by_kind:
        return by_kind.get("full_attention") or next(iter(by_kind.values())), by_kind
    return _read_rope(top, ConfigReader(values, f"{key}."), head_dim, max_position_embeddings), {}


def _read_rope(
    top: ConfigReader,
    rope: ConfigReader,
    head_dim: int,
    max_position_embeddings: int,
    theta_key: str = "rope_theta",
) -> RopeConfig:
    """theta_key: where theta stands at the top level."""
    rope_type = _rope_type(rope)
    theta = rope.number("rope_theta") if rope.has("rope_theta") else top.number_or(theta_key, DEFAULT_THETA)
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
        factor = max_position_embeddings / original if rope_type in ("yarn", "longrope") else 1.0
    if rope_type == "llama3":
        for needed in ("low_freq_factor", "high_freq_factor"):
            rope.number(needed)
    is_long = rope_type == "longrope"
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
        short_factors=rope.numbers("short_factor", rotary_dim // 2) if is_long else (),
        long_factors=rope.numbers("long_factor", rotary_dim // 2) if is_long else (),
    )


def _rope_type(rope: ConfigReader) -> str:
    key = "rope_type" if rope.has("rope_type") else "type"
    name = rope.raw.get(key)
    # What the first releases of Phi 3 called it.
    if name == "su" or (name == "yarn" and rope.has("long_factor")):
        return "longrope"
    return rope.text(key, "default", ROPE_TYPES)
