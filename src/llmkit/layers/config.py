"""The architecture of an ordinary decoder, read from a Hugging Face `config.json`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmkit.errors import ModelError
from llmkit.layers.config_reader import ConfigReader
from llmkit.layers.rope_config import RopeConfig, read_ropes

MAX_LAYERS = 10_000
"""Far above any model: every layer is an object, and a damaged file must not ask for two billion of them."""
MAX_EXPERTS = 4096
"""The same for the experts of a layer."""

DTYPES = ("float32", "bfloat16", "float16")
# Name in config.json → operation of the kernel table, without `_and_mul`.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


@dataclass(frozen=True)
class ExpertOptions:
    """A feed-forward block of experts: each token goes through the num_experts_per_tok that its router ranks highest.

    intermediate_size: of one expert. renormalise: the weights of the chosen ones are made to add up to 1.
    names: what the checkpoint calls an expert's gate, up and down projections.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    renormalise: bool = True
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    @classmethod
    def read(cls, config: DecoderConfig, size_key: str, default_count: int, **options: Any) -> ExpertOptions:
        """The experts of a configuration. Their number is `num_local_experts` or `num_experts`, as transformers and
        the checkpoints do not agree on one key; their size is under the architecture's own. Raises ModelError."""
        read = ConfigReader(config.raw)
        key = "num_local_experts" if read.has("num_local_experts") else "num_experts"
        experts = read.integer(key, maximum=MAX_EXPERTS) if read.has(key) else default_count
        chosen = read.integer("num_experts_per_tok")
        if chosen > experts:
            raise read.bad("num_experts_per_tok", f"at most the number of experts, {experts}")
        return cls(experts, chosen, read.integer(size_key), **options)


@dataclass(frozen=True)
class LayerOptions:
    """What distinguishes one decoder layer from the plain one; a model file states it for each layer.

    sliding_window in tokens, None: full attention. scale multiplies q·k, None: 1/sqrt(head_dim).
    output_norms: the outputs of attention and feed-forward go through norms of their own before they are added to the
    residual stream. norm_offset: what is added to the checkpoint's norm weights. fused_weights: the checkpoint has the
    projections to queries, keys and values as one tensor `qkv_proj`, gate and up as `gate_up_proj`.
    experts: None for one dense feed-forward block. feed_forward: what the checkpoint calls the block.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None
    output_norms: bool = False
    norm_offset: float = 0.0
    fused_weights: bool = False
    experts: ExpertOptions | None = None
    feed_forward: str = "mlp"


@dataclass(frozen=True)
class DecoderConfig:
    """Fields are named as in `config.json`; sizes in elements, `sliding_window` in tokens.

    dtype: name of the checkpoint's torch type, None if it does not say. activation: operation of the kernel table
    without `_and_mul`. sliding_window is None unless it is in use. rope_by_kind: where rotary parameters differ by kind
    of layer, those of every kind. raw: the keys and values that this was read from, for what is particular to an
    architecture.
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
    rope_by_kind: Mapping[str, RopeConfig] = field(default_factory=dict)
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
        rope, rope_by_kind = read_ropes(values, head_dim, max_positions)
        activation = "hidden_activation" if read.has("hidden_activation") else "hidden_act"
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
            rope=rope,
            rope_by_kind=rope_by_kind,
            rms_norm_eps=read.number_or("rms_norm_eps", 1e-6),
            activation=ACTIVATIONS[read.text(activation, "silu", tuple(ACTIVATIONS))],
            tie_word_embeddings=read.boolean("tie_word_embeddings", False),
            attention_bias=read.boolean("attention_bias", False),
            mlp_bias=read.boolean("mlp_bias", False),
            sliding_window=read.optional_integer("sliding_window") if uses_window else None,
            max_window_layers=read.integer_or("max_window_layers", 28, minimum=0),
            layer_types=_layer_types(read, layers),
            dtype=_dtype(read),
            bos_token_id=read.optional_integer("bos_token_id", minimum=0),
            eos_token_ids=_eos_token_ids(read),
            raw=values,
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

    def rope_of_layer(self, index: int) -> RopeConfig:
        """Rotary parameters of decoder layer `index`. Raises ModelError if they are not given for its kind."""
        if not self.rope_by_kind:
            return self.rope
        kind = self.layer_types[index] if self.layer_types is not None else "full_attention"
        if kind not in self.rope_by_kind:
            raise ModelError(
                f"The model's config.json has rope_parameters for {', '.join(self.rope_by_kind)} but not for {kind!r}, "
                f"which layer {index} is."
            )
        return self.rope_by_kind[kind]


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
        if not read.has("sliding_window_pattern"):
            return None
        pattern = read.integer("sliding_window_pattern")
        return tuple("sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers))
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
