"""Logits of a real model for whole texts: by llmkit, with any settings, and by Hugging Face's own code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from llmkit import LLM
from llmkit.config import load_config
from llmkit.engine.factory import prepare_model
from llmkit.execution.building import DTYPES, KV_DTYPES
from llmkit.layers.attention import Attention
from llmkit.testing.models import ModelTrial

MAX_MODEL_LEN = 256
PAGE_SIZE = 16


def opened_model(model: str, *, device: str, **settings: Any) -> LLM:
    """An engine whose model is to be looked at; it serves few sequences, so its start is short."""
    return LLM(model, device=device, max_model_len=MAX_MODEL_LEN, max_num_seqs=8, num_blocks=32, **settings)


@torch.inference_mode()
def of_llmkit(
    model: str, texts: Sequence[torch.Tensor], *, device: str, few: int | None = None, **settings: Any
) -> Iterator[torch.Tensor]:
    """`of_engine` of an engine with these settings."""
    with opened_model(model, device=device, **settings) as llm:
        yield from of_engine(llm, texts, few)


@torch.inference_mode()
def of_engine(llm: LLM, texts: Sequence[torch.Tensor], few: int | None = None) -> Iterator[torch.Tensor]:
    """Of every text int64[t], float32 [t, vocabulary] on the engine's device. few: read so many tokens at a time, which
    other kernels do than whole prompts. The engine's cache is left alone."""
    built = llm.engine.core.executor._worker._built
    layers = [module.layer for module in built.model.modules() if isinstance(module, Attention)]
    device = llm.config.execution.device
    for ids in texts:
        trial = ModelTrial(
            built.model,
            layers,
            built.backend,
            page_size=PAGE_SIZE,
            num_pages=-(-len(ids) // PAGE_SIZE) + 1,
            dtype=KV_DTYPES[llm.config.kv_cache.dtype],
            device=device,
        )
        yield torch.cat([trial.logits({0: part}) for part in ids.split(few or len(ids))]).to(device)


@torch.inference_mode()
def of_hugging_face(model: str, texts: Sequence[torch.Tensor], *, device: str, dtype: str) -> Iterator[torch.Tensor]:
    """What transformers makes of the same weights, rounded to `dtype`; what it holds in float32 stays so."""
    peer = hugging_face(model).to(device)
    for parameter in peer.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype])
    for ids in texts:
        yield peer(ids.unsqueeze(0).to(device), use_cache=False).logits[0].float()


def hugging_face(model: str) -> Any:
    """transformers' model in float32 on the host, with the numbers of the file that llmkit reads."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = prepare_model(load_config(flags={"model.model": model}).config).source
    keys = {key: value for key, value in source.config.items() if key not in ("model_type", "architectures")}
    if "rope_parameters" in keys:  # transformers before 5
        keys.setdefault("rope_theta", keys["rope_parameters"].get("rope_theta"))
    peer = AutoModelForCausalLM.from_config(AutoConfig.for_model(source.config["model_type"], **keys)).float().eval()
    missing, unknown = peer.load_state_dict(dict(source.tensors()), strict=False)
    assert not unknown, unknown
    assert not missing or (missing == ["lm_head.weight"] and keys["tie_word_embeddings"]), missing
    peer.tie_weights()
    return peer
