"""Names and shapes of a dense decoder's tensors, as its Hugging Face checkpoint has them."""

from __future__ import annotations

from typing import Any

from llmkit.layers.config import DecoderConfig

# What an architecture's checkpoint has beyond what its config.json says.
_QKV_BIAS = frozenset({"Qwen2ForCausalLM"})
_QK_NORM = frozenset({"Qwen3ForCausalLM"})


def decoder_tensors(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape for a configuration with the keys of a config.json. Raises ModelError for a bad one."""
    config = DecoderConfig.from_hf(raw)
    architectures = frozenset(raw.get("architectures") or ())
    hidden = config.hidden_size
    embedding = (config.vocab_size, hidden)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": embedding}
    layer = _attention(config, architectures) | _mlp(config) | {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }  # fmt: skip
    for index in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = embedding
    return shapes


def _attention(config: DecoderConfig, architectures: frozenset[str]) -> dict[str, tuple[int, ...]]:
    query = config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
    }
    if config.attention_bias or architectures & _QKV_BIAS:
        shapes |= {f"self_attn.{name}_proj.bias": (size,) for name, size in (("q", query), ("k", key), ("v", key))}
    if config.attention_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if architectures & _QK_NORM:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in ("q", "k")}
    return shapes


def _mlp(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    sizes = {
        "gate_proj": (config.intermediate_size, config.hidden_size),
        "up_proj": (config.intermediate_size, config.hidden_size),
        "down_proj": (config.hidden_size, config.intermediate_size),
    }
    shapes: dict[str, tuple[int, ...]] = {f"mlp.{name}.weight": shape for name, shape in sizes.items()}
    if config.mlp_bias:
        shapes |= {f"mlp.{name}.bias": shape[:1] for name, shape in sizes.items()}
    return shapes
