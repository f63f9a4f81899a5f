"""GGUF files of architectures with names and keys of their own: the same model as from the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from llmkit.errors import ModelError
from llmkit.layers.context import ModelContext
from llmkit.layers.decoder import DecoderForCausalLM
from llmkit.registry import Registry, detect_environment
from llmkit.testing.conformance.arguments import small_context
from llmkit_weights.gguf_format import GgufFormat

Tensors = dict[str, torch.Tensor]
HIDDEN, LAYERS, HEADS, KV_HEADS, SIZE, INNER, EXPERT, VOCABULARY, EXPERTS = 64, 4, 4, 2, 16, 96, 32, 40, 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}
LONG = [1 + i / 4 for i in range(6)]

# GGUF architecture → name in config.json, what config.json has besides, GGUF metadata besides, layer modules
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "gemma3": (
        "Gemma3ForCausalLM",
        {"sliding_window": 9, "sliding_window_pattern": 2, "query_pre_attn_scalar": SIZE, "rope_local_base_freq": 1e4},
        {"attention.sliding_window": 9, "attention.sliding_window_pattern": 2},
        {
            "self_attn.q_norm": "attn_q_norm",
            "self_attn.k_norm": "attn_k_norm",
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
    ),
    "phi3": (
        "Phi3ForCausalLM",
        {
            "sliding_window": 11,
            "original_max_position_embeddings": 32,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": LONG},
        },
        {
            "attention.sliding_window": 11,
            "rope.dimension_count": 12,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.attn_factor": (1 + 2 / 5) ** 0.5,  # ln 4 / ln 32
        },
        {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    ),
    "qwen3moe": (
        "Qwen3MoeForCausalLM",
        {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT, "norm_topk_prob": True},
        {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": EXPERT},
        {
            "self_attn.q_norm": "attn_q_norm",
            "self_attn.k_norm": "attn_k_norm",
            "mlp.gate": "ffn_gate_inp",
            "mlp.experts.*.gate_proj": "ffn_gate_exps",
            "mlp.experts.*.up_proj": "ffn_up_exps",
            "mlp.experts.*.down_proj": "ffn_down_exps",
        },
    ),
    "llama": (
        "MixtralForCausalLM",
        {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": None},
        {"expert_count": EXPERTS, "expert_used_count": 2},
        {
            "block_sparse_moe.gate": "ffn_gate_inp",
            "block_sparse_moe.experts.*.w1": "ffn_gate_exps",
            "block_sparse_moe.experts.*.w3": "ffn_up_exps",
            "block_sparse_moe.experts.*.w2": "ffn_down_exps",
        },
    ),
}
COMMON = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def built(raw: dict[str, Any]) -> tuple[DecoderForCausalLM, ModelContext]:
    registry, environment = Registry.discover(), detect_environment()
    (architecture,) = raw["architectures"]
    context = small_context(registry, environment, architecture, **raw)
    return registry.create("model", architecture, environment, context=context), context


def checkpoint(raw: dict[str, Any]) -> Tensors:
    draw = torch.Generator().manual_seed(0)
    return {n: torch.randn(shape, generator=draw) for n, shape in built(raw)[0].weight_shapes().items()}


def in_file_order(module: str, tensor: torch.Tensor, architecture: str) -> torch.Tensor:
    """As llama.cpp's converter stores it: q and k of its llama interleaved, Gemma's norms with 1 added."""
    if architecture == "llama" and module.endswith(("q_proj", "k_proj")):
        heads = HEADS if module.endswith("q_proj") else KV_HEADS
        return tensor.view(heads, 2, SIZE // 2, HIDDEN).swapaxes(1, 2).reshape(tensor.shape)
    return tensor + 1 if architecture == "gemma3" and module.endswith("norm") else tensor


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """write(architecture, tensors, experts_apart=…) → a GGUF file of the tensors."""

    def make(architecture: str, tensors: Tensors, experts_apart: bool = False) -> Path:
        _, _, metadata, modules = CASES[architecture]
        path = tmp_path / f"{architecture}.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in {
            "block_count": LAYERS, "context_length": 128, "embedding_length": HIDDEN, "feed_forward_length": INNER,
            "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": SIZE,
            "attention.value_length": SIZE, **metadata,
        }.items():  # fmt: skip
            name = f"{architecture}.{key}"
            writer.add_uint32(name, value) if isinstance(value, int) else writer.add_float32(name, value)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(5e5)
        if architecture == "phi3":
            writer.add_tensor("rope_factors_long.weight", torch.tensor(LONG).numpy())
            writer.add_tensor("rope_factors_short.weight", torch.ones(6).numpy())
        for name, tensor in gguf_tensors(architecture, tensors, {**COMMON, **modules}, experts_apart).items():
            writer.add_tensor(name, tensor.contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


def gguf_tensors(architecture: str, tensors: Tensors, modules: dict[str, str], experts_apart: bool) -> Tensors:
    named: Tensors = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        stored = in_file_order(module, tensor, architecture)
        if not module.startswith("model.layers."):
            named[{"model.embed_tokens": "token_embd", "model.norm": "output_norm"}[module] + ".weight"] = stored
            continue
        _, _, layer, rest = module.split(".", 3)
        expert = next((part for part in rest.split(".") if part.isdigit()), None)
        short = modules[rest if expert is None else rest.replace(f".{expert}.", ".*.")]
        if expert is None:
            named[f"blk.{layer}.{short}.weight"] = stored
        elif experts_apart:
            named[f"blk.{layer}.{short.removesuffix('_exps')}.{expert}.weight"] = stored
        else:
            stacks.setdefault(f"blk.{layer}.{short}.weight", []).append(stored)
    return named | {name: torch.stack(parts) for name, parts in stacks.items()}


@pytest.mark.parametrize("architecture", CASES)
def test_it_is_the_same_model(architecture: str, write: Callable[..., Path]) -> None:
    name, keys, _, _ = CASES[architecture]
    raw = {"architectures": [name], **SIZES, **keys}
    tensors = checkpoint(raw)
    path = write(architecture, tensors)
    reader = GgufFormat()
    found = reader.config(path)
    assert found["architectures"] == [name]
    read = dict(reader.tensors(path, found))
    assert read.keys() == tensors.keys()
    for key, tensor in tensors.items():
        torch.testing.assert_close(read[key], tensor, rtol=0, atol=1e-6)
    assert reader.size_bytes(path) == sum(t.nbytes for t in tensors.values())
    (theirs, expected), (ours, context) = built(raw), built(found)
    assert context.attention_layers == expected.attention_layers
    assert ours.weight_shapes() == theirs.weight_shapes()
    for index in range(LAYERS):
        mine, other = context.config.rope_of_layer(index), expected.config.rope_of_layer(index)
        assert (mine.theta, mine.rotary_dim, mine.long_factors) == (other.theta, other.rotary_dim, other.long_factors)
    for key in ("activation", "tie_word_embeddings", "max_position_embeddings", "rms_norm_eps"):
        assert getattr(context.config, key) == pytest.approx(getattr(expected.config, key)), key
    if architecture == "phi3":
        from llmkit.layers.rotary import attention_factor

        assert attention_factor(context.config.rope) == pytest.approx(attention_factor(expected.config.rope))


def test_experts_one_by_one_as_early_files_have_them(write: Callable[..., Path]) -> None:
    name, keys, _, _ = CASES["llama"]
    tensors = checkpoint({"architectures": [name], **SIZES, **keys})
    path = write("llama", tensors, experts_apart=True)
    reader = GgufFormat()
    read = dict(reader.tensors(path, reader.config(path)))
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[key], tensor) for key, tensor in tensors.items())


def test_tensors_of_another_architecture_are_named(write: Callable[..., Path]) -> None:
    name, keys, _, _ = CASES["phi3"]
    tensors = checkpoint({"architectures": [name], **SIZES, **keys})
    path = write("phi3", tensors)
    content = path.read_bytes().replace(b"blk.0.attn_qkv.weight", b"blk.0.ffn_down_exps.w")
    path.write_bytes(content)
    reader = GgufFormat()
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_down_exps\.w, which no known architecture has"):
        list(reader.tensors(path, reader.config(path)))
