"""What GGUF metadata means in single architectures: the keys of config.json that not every decoder has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from llmkit_weights.gguf_file import GgufFile


class Keys(Protocol):
    """Metadata under the architecture's prefix."""

    def get(self, key: str, default: Any = None) -> Any: ...
    def required(self, key: str) -> Any: ...


def _mixtral(_file: GgufFile, read: Keys) -> dict[str, Any]:
    return {
        "model_type": "mixtral",
        "num_local_experts": read.required("expert_count"),
        "num_experts_per_tok": read.required("expert_used_count"),
        "sliding_window": read.get("attention.sliding_window"),
    }


def _mistral(_file: GgufFile, read: Keys) -> dict[str, Any]:
    return {"model_type": "mistral", "sliding_window": read.required("attention.sliding_window")}


def _qwen3_moe(_file: GgufFile, read: Keys) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "num_experts": read.required("expert_count"),
        "num_experts_per_tok": read.required("expert_used_count"),
        "moe_intermediate_size": read.required("expert_feed_forward_length"),
        "norm_topk_prob": read.get("expert_weights_norm", True),  # of all releases, whose files do not say
    }


def _gemma3(_file: GgufFile, read: Keys) -> dict[str, Any]:
    heads, hidden = read.required("attention.head_count"), read.required("embedding_length")
    # The largest of them has a scale of its own, which files do not say.
    scale_of = hidden // heads if read.required("block_count") == 62 else read.required("attention.key_length")
    return {
        "model_type": "gemma3_text",
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scale_of,
        "sliding_window": read.required("attention.sliding_window"),
        "sliding_window_pattern": read.get("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": read.get("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": read.get("final_logit_softcapping"),
        "attn_logit_softcapping": read.get("attn_logit_softcapping"),
    }


def _phi3(file: GgufFile, read: Keys) -> dict[str, Any]:
    config: dict[str, Any] = {"model_type": "phi3", "sliding_window": read.get("attention.sliding_window") or None}
    long = file.tensors.get("rope_factors_long.weight")
    short = file.tensors.get("rope_factors_short.weight")
    if long is None or short is None:
        return config
    from llmkit_weights.gguf_values import read_array

    head_dim = read.get("attention.key_length") or read.required("embedding_length") // read.required(
        "attention.head_count"
    )
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "partial_rotary_factor": read.get("rope.dimension_count", head_dim) / head_dim,
        "rope_theta": read.get("rope.freq_base", 10_000.0),
        "long_factor": read_array(file, long).tolist(),
        "short_factor": read_array(file, short).tolist(),
    }
    if (factor := read.get("rope.scaling.attn_factor")) is not None:
        rope["attention_factor"] = factor
    original = read.get("rope.scaling.original_context_length", read.required("context_length"))
    return config | {"original_max_position_embeddings": original, "rope_parameters": rope}


Extra = Callable[[GgufFile, Keys], dict[str, Any]]
# Name in config.json → what it has besides the keys of every decoder.
EXTRAS: dict[str, Extra] = {
    "Gemma3ForCausalLM": _gemma3,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Phi3ForCausalLM": _phi3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}

_NAMES = {
    "gemma3": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
KNOWN = tuple(_NAMES)


def architecture_of(file: GgufFile) -> str | None:
    """The name in config.json of the architecture of `file`; None if it is not known.

    llama.cpp files Mistral and Mixtral under llama: only the experts or the window tell them apart."""
    name = file.get("general.architecture")
    experts = file.get(f"{name}.expert_count")
    if name == "llama" and experts:
        return "MixtralForCausalLM"
    if name == "llama" and file.get("llama.attention.sliding_window"):
        return "MistralForCausalLM"
    found = _NAMES.get(name)
    return None if experts and found != "Qwen3MoeForCausalLM" else found


def norm_offset(architecture: str) -> float:
    """What llama.cpp's converter has added to the norms' weights of the architecture."""
    return 1.0 if architecture == "Gemma3ForCausalLM" else 0.0
