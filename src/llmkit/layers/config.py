"""The architecture of an ordinary decoder, read from a Hugging Face `config.json`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmkit.errors import ModelError
from llmkit.layers.config_reader import ConfigReader
from llmkit.layers.rope_config import RopeConfig, read_rope

MAX_LAYERS = 10_000
"""Far above any model: every layer is an object, and a damaged file must not ask for two billion of them."""

DTYPES = ("float32", "bfloat16", "float16")
# Name in config.json → operation of the kernel table, without `_and_mul`.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


@dataclass(frozen=True)
class LayerOptions:
    """What distinguishes one decoder layer from the plain one; a model file states it for each layer.

    sliding_window in tokens, None: full attention. scale multiplies q·k, None: 1/sqrt(head_dim).
    """

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None


@dataclass(frozen=True)
class DecoderConfig:
    """Fields are named as in `config.json`; sizes in elements, `sliding_window` in tokens.

    dtype: name of the checkpoint's torch type, None if it does not say. activation: operation of the kernel table
    without `_and_mul`. sliding_window is None unless it is in use. raw: the configuration this was read from, for
    what is particular to an architecture.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: RopeConfig
    rms_norm_eps: float = 1e-6
    activation: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None
    dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> DecoderConfig:
        """Read the keys of a `config.json`.

        Missing keys take `defaults` (those of the architecture), else the values that Hugging Face's Llama takes;
        the sizes of the weights have no defaults. Raises ModelError naming the key that is missing, bad or asks
        for something unsupported.
        """
        values = {**(defaults or {}), **raw}
        read = ConfigReader(values)
        if values.get("quantization_config") is not None:
            raise ModelError(
                "The model's config.json has quantization_config: its weights are stored quantized, which is not "
                "supported.",
                hint="Use the full-precision checkpoint and --quantization.",
            )
        heads = read.integer("num_attention_heads")
        kv_heads = read.integer_or("num_key_value_heads", heads)
        if heads % kv_heads:
            raise read.bad("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
        head_dim = _head_dim(read, heads)
        layers = read.integer("num_hidden_layers", maximum=MAX_LAYERS)
        max_positions = read.integer_or("max_position_embeddings", 2048)
        # Only where the key exists (Qwen) can a given window be out of use.
        uses_window = read.boolean("use_sliding_window", True)
        return cls(
            vocab_size=read.integer("vocab_size"),
            hidden_size=read.integer("hidden_size"),
            intermediate_size=read.integer("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rope=read_rope(values, head_dim, max_positions),
            rms_norm_eps=read.number_or("rms_norm_eps", 1e-6),
            activation=ACTIVATIONS[read.text("hidden_act", "silu", tuple(ACTIVATIONS))],
            tie_word_embeddings=read.boolean("tie_word_embeddings", False),
            attention_bias=read.boolean("attention_bias", False),
            mlp_bias=read.boolean("mlp_bias", False),
            sliding_window=read.optional_integer("sliding_window") if uses_window else None,
            max_window_layers=read.integer_or("max_window_layers", 28, minimum=0),
            layer_types=_layer_types(read, layers),
            dtype=_dtype(read),
            bos_token_id=read.optional_integer("bos_token_id", minimum=0),
            eos_token_ids=_eos_token_ids(read),
            raw=dict(raw),
        )

    def with_defaults(self, defaults: Mapping[str, Any]) -> DecoderConfig:
        """The same configuration with an architecture's own defaults for the keys that `raw` lacks."""
        return DecoderConfig.from_hf(self.raw, defaults)

    def window_by_layer(self, index: int) -> int | None:
        """Sliding window of decoder layer `index` by `layer_types`, or, without it, from `max_window_layers` on.

        Raises ModelError for an unknown kind of layer, or a sliding layer without a window.
        """
        if self.layer_types is None:
            return self.sliding_window if index >= self.max_window_layers else None
        kind = self.layer_types[index]
        if kind == "full_attention":
            return None
        if kind != "sliding_attention":
            raise ModelError(
                f"The model's config.json has layer_types[{index}] = {kind!r}; supported are full_attention and "
                "sliding_attention."
            )
        if self.sliding_window is None:
            raise ModelError(
                f"The model's config.json has layer_types[{index}] = {kind!r} but no sliding_window is in use."
            )
        return self.sliding_window


def _head_dim(read: ConfigReader, heads: int) -> int:
    if read.has("head_dim"):
        return read.integer("head_dim")
    hidden = read.integer("hidden_size")
    if hidden % heads:
        raise read.bad("hidden_size", f"a multiple of num_attention_heads = {heads} where head_dim is not given")
    return hidden // heads


def _layer_types(read: ConfigReader, layers: int) -> tuple[str, ...] | None:
    value = read.raw.get("layer_types")
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != layers or not all(isinstance(v, str) for v in value):
        raise read.bad("layer_types", f"a list of num_hidden_layers = {layers} texts")
    return tuple(value)


def _dtype(read: ConfigReader) -> str | None:
    key = "dtype" if read.has("dtype") else "torch_dtype"
    name = read.text(key, "").removeprefix("torch.")
    if not name:
        return None
    if name not in DTYPES:
        raise read.bad(key, f"one of {', '.join(DTYPES)}")
    return name


def _eos_token_ids(read: ConfigReader) -> tuple[int, ...]:
    value = read.raw.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise read.bad("eos_token_id", "a token id or a list of token ids")
    return tuple(ids)
