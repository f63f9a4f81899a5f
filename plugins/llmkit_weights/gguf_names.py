"""GGUF tensor names of dense decoders → the names of their Hugging Face checkpoint."""

from __future__ import annotations

import re

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
# Tables derived from the configuration: the model computes them itself.
_DERIVED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")
_PARAMETER = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<kind>weight|bias)")


def is_derived(name: str) -> bool:
    """Whether tensor `name` is no parameter of the checkpoint."""
    return _DERIVED.fullmatch(name) is not None


def checkpoint_name(name: str) -> str | None:
    """The Hugging Face name of GGUF tensor `name`; None if it is none of a dense decoder's."""
    match = _PARAMETER.fullmatch(name)
    if match is None:
        return None
    module = (_GLOBAL if match["layer"] is None else _LAYER).get(match["module"])
    if module is None:
        return None
    prefix = "" if match["layer"] is None else f"model.layers.{match['layer']}."
    return f"{prefix}{module}.{match['kind']}"
