"""GGUF tensor names of decoders → the names of their Hugging Face checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping

_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Where an architecture's checkpoint has other names; "{expert}" stands where a file stacks what a checkpoint has apart.
_OF_ARCHITECTURE: Mapping[str, Mapping[str, str]] = {
    "Gemma3ForCausalLM": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "MixtralForCausalLM": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
        "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
        "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    },
    "Phi3ForCausalLM": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "Qwen3MoeForCausalLM": {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
        "ffn_down_exps": "mlp.experts.{expert}.down_proj",
        "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    },
}
# Tables derived from the configuration: the model computes them itself.
_DERIVED = re.compile(r"(rope_freqs|rope_factors_long|rope_factors_short|blk\.\d+\.attn_rot_embd)\.weight")
# Early files have experts one by one: blk.3.ffn_gate.7.weight.
_PARAMETER = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)(?:\.(?P<expert>\d+))?\.(?P<kind>weight|bias)")


def is_derived(name: str) -> bool:
    """Whether tensor `name` is no parameter of the checkpoint."""
    return _DERIVED.fullmatch(name) is not None


def checkpoint_name(name: str, architecture: str) -> str | None:
    """The name of GGUF tensor `name` in a checkpoint of the architecture (as in config.json); with "{expert}" in it
    for a stack of the experts' tensors. None if the architecture has no such tensor."""
    match = _PARAMETER.fullmatch(name)
    if match is None:
        return None
    layer, module, expert = match["layer"], match["module"], match["expert"]
    if layer is None:
        found = _GLOBAL.get(module)
    else:
        known = {**_LAYER, **_OF_ARCHITECTURE.get(architecture, {})}
        found = known.get(module if expert is None else f"{module}_exps")
    if found is None or (expert is not None and "{expert}" not in found):
        return None
    prefix = "" if layer is None else f"model.layers.{layer}."
    full = f"{prefix}{found}.{match['kind']}"
    return full if expert is None else full.format(expert=expert)
