"""Tiny models in files: what the readers must read, written by the formats' own libraries."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, VOCABULARY = 4, 2, 16, 64, 96, 40
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 128,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
}

Tensors = dict[str, torch.Tensor]
WriteGguf = Callable[..., Path]


def checkpoint_tensors(qkv_bias: bool = False, qk_norm: bool = False, head: bool = False) -> Tensors:
    """A one-layer checkpoint with random values, under its Hugging Face names."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "model.layers.0.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        "model.norm.weight": (HIDDEN,),
    }
    if qkv_bias:
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"model.layers.0.self_attn.{name}_proj.bias"] = (heads * HEAD_DIM,)
    if qk_norm:
        for name in ("q", "k"):
            shapes[f"model.layers.0.self_attn.{name}_norm.weight"] = (HEAD_DIM,)
    if head:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.0.input_layernorm": "blk.0.attn_norm",
    "model.layers.0.self_attn.q_proj": "blk.0.attn_q",
    "model.layers.0.self_attn.k_proj": "blk.0.attn_k",
    "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
    "model.layers.0.self_attn.o_proj": "blk.0.attn_output",
    "model.layers.0.self_attn.q_norm": "blk.0.attn_q_norm",
    "model.layers.0.self_attn.k_norm": "blk.0.attn_k_norm",
    "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
    "model.layers.0.mlp.gate_proj": "blk.0.ffn_gate",
    "model.layers.0.mlp.up_proj": "blk.0.ffn_up",
    "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
}


def permuted(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to q and k of the architecture llama, written out row by row."""
    result = np.empty_like(values)
    head_dim = len(values) // heads
    for head in range(heads):
        for i in range(head_dim // 2):
            for half in range(2):
                result[head * head_dim + 2 * i + half] = values[head * head_dim + half * (head_dim // 2) + i]
    return result


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """write_gguf(tensors, architecture=…, quantise=…, metadata=…) → path of a GGUF file of a tiny model.

    tensors: under Hugging Face names. quantise: ggml type of the matrices. metadata(writer): further keys. raw:
    tensors written as they are, under their GGUF names."""
    import gguf

    def write(
        tensors: Tensors,
        *,
        architecture: str = "llama",
        quantise: str = "F32",
        metadata: Callable[[Any], None] | None = None,
        raw: dict[str, np.ndarray[Any, Any]] | None = None,
        name: str = "tiny.gguf",
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_block_count(1)
        writer.add_context_length(128)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INTERMEDIATE)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        if metadata is not None:
            metadata(writer)
        for full_name, tensor in tensors.items():
            module, kind = full_name.rsplit(".", 1)
            values = tensor.float().numpy()
            if architecture == "llama" and module.endswith(("q_proj", "k_proj")):
                values = permuted(values, HEADS if module.endswith("q_proj") else KV_HEADS)
            quantisation = gguf.GGMLQuantizationType[quantise if values.ndim > 1 else "F32"]
            writer.add_tensor(
                f"{GGUF_NAMES[module]}.{kind}", gguf.quants.quantize(values, quantisation), raw_dtype=quantisation
            )
        for raw_name, values in (raw or {}).items():
            writer.add_tensor(raw_name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def tensors() -> Tensors:
    return checkpoint_tensors()


@pytest.fixture
def make_tensors() -> Callable[..., Tensors]:
    return checkpoint_tensors


@pytest.fixture
def config() -> dict[str, Any]:
    return dict(CONFIG)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder with a config.json and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def sharded_folder(model_folder: Path, tensors: Tensors) -> Path:
    """The same model in two shards with an index."""
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[:5], names[5:]), start=1):
        file_name = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, model_folder / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return model_folder
