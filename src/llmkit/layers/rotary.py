"""Rotary position embedding, with the ways of stretching it to longer contexts.

Sources: Su et al., "RoFormer" (2021); "linear": Chen et al., "Extending Context Window of Large Language Models via
Positional Interpolation" (2023); "yarn": Peng et al., "YaRN" (2023); "longrope": Ding et al., "LongRoPE" (2024);
"llama3": the release of Llama 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from llmkit.errors import ModelError
from llmkit.layers.module import Module

if TYPE_CHECKING:
    from llmkit.layers.context import ModelContext
    from llmkit.layers.rope_config import RopeConfig


def _plain(rope: RopeConfig) -> torch.Tensor:
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    return 1.0 / rope.theta**exponents


def _linear(rope: RopeConfig) -> torch.Tensor:
    return _plain(rope) / rope.factor


def _llama3(rope: RopeConfig) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones left alone, with a linear transition in 1/wavelength."""
    frequencies = _plain(rope)
    turns = rope.original_length * frequencies / (2 * math.pi)  # over the original context
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = share.clamp(0.0, 1.0)
    return share * frequencies + (1.0 - share) * frequencies / rope.factor


def _yarn(rope: RopeConfig) -> torch.Tensor:
    """Frequencies that turn less than beta_slow times in the original context are interpolated, those that turn
    more than beta_fast times are kept; in between a ramp over the index of the frequency."""

    def index_with(turns: float) -> float:
        return rope.rotary_dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index_with(rope.beta_fast), index_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low if high != low else 0.001  # a step instead of a ramp
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    frequencies = _plain(rope)
    return frequencies / rope.factor * ramp + frequencies * (1.0 - ramp)


def _longrope(rope: RopeConfig, length: int) -> torch.Tensor:
    """A divisor of its own for every frequency; one set of them for contexts of the original length, another for
    longer ones."""
    return _plain(rope) / torch.tensor(rope.long_factors if length > rope.original_length else rope.short_factors)


_FREQUENCIES: dict[str, Callable[[RopeConfig], torch.Tensor]] = {
    "default": _plain,
    "dynamic": _plain,  # as long as the context is not exceeded, see RotaryEmbedding
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def inverse_frequencies(rope: RopeConfig, length: int = 0) -> torch.Tensor:
    """Radians per position, float32 [rotary_dim / 2] on the CPU. length: of the longest sequence, for "longrope"."""
    if rope.rope_type == "longrope":
        return _longrope(rope, length)
    return _FREQUENCIES[rope.rope_type](rope)


def attention_factor(rope: RopeConfig) -> float:
    """What cosines and sines are multiplied by; other than 1 only for "yarn" (the paper's equation 22) and "longrope"
    (section 3.3)."""
    if rope.rope_type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type == "longrope":
        return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_length))

    def magnitude(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


class RotaryEmbedding(Module):
    """Rotates queries and keys by their positions. One object serves all layers with the same parameters.

    With "longrope" the longest sequence that the engine allows decides which frequencies all sequences have: keys in
    the cache could not follow a sequence that grows out of the original context. The table of cosines and sines is
    float32 whatever the model's type, and made at the first use.
    """

    def __init__(self, context: ModelContext, rope: RopeConfig | None = None) -> None:
        """rope: None for the configuration's. Raises ModelError if the context is longer than a "dynamic" embedding
        can serve."""
        super().__init__()
        config = context.config
        self.rope = rope or config.rope
        self.head_size = config.head_dim
        self.max_positions = context.max_model_len or config.max_position_embeddings
        self._kernels = context.kernels
        self._cos_sin: torch.Tensor | None = None
        if self.rope.rope_type == "dynamic" and self.max_positions > config.max_position_embeddings:
            # Frequencies would change with the length of each sequence, and with them every key in the cache.
            raise ModelError(
                'The model\'s config.json has rope_type = "dynamic", which is supported up to '
                f"max_position_embeddings = {config.max_position_embeddings} tokens, not {self.max_positions}.",
                hint="Choose a smaller --max-model-len.",
            )

    def forward(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
        """Rotate query [t, heads*head_size] and key [t, kv_heads*head_size] in place; positions int64 [t]."""
        self._kernels.rotary(positions, query, key, self.table_on(positions.device), self.head_size)

    def table_on(self, device: torch.device) -> torch.Tensor:
        """`table`, computed where it has not been yet."""
        table = self._cos_sin
        if table is None or table.device != device:
            return self.table(device)
        return table

    def table(self, device: torch.device) -> torch.Tensor:
        """float32 [max_positions, rotary_dim]: cosines, then sines; kept for later calls."""
        # float32 throughout, as in the implementations that the models were trained with.
        positions = torch.arange(self.max_positions, dtype=torch.float32)
        angles = positions[:, None] * inverse_frequencies(self.rope, self.max_positions)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor(self.rope)
        self._cos_sin = table.to(device)
        return self._cos_sin
