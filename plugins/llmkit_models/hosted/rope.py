"""Rotary embeddings that would change their frequencies while sequences grow are held still.

transformers looks at the longest position of each call: a flat batch has rows of all lengths, and keys in the cache
stay as they were rotated.
"""

from __future__ import annotations

from typing import Any

import torch

from llmkit.errors import ModelError


def freeze_rope(model: torch.nn.Module, length: int) -> None:
    """Give every rotary embedding of `model` the frequencies for sequences of up to `length` tokens, for good.

    Raises ModelError if "dynamic" frequencies would have to change within that length.
    """
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str):
            module.rope_type = _frozen(module, rope_type, length, None)
        elif isinstance(rope_type, dict):
            module.rope_type = {kind: _frozen(module, name, length, kind) for kind, name in rope_type.items()}


def _frozen(module: Any, rope_type: str, length: int, kind: str | None) -> str:
    """The type to go on with, after the frequencies were set. kind: of layer, where each has its own."""
    if "dynamic" in rope_type:
        if length > module.original_max_seq_len:
            raise ModelError(
                f'The model\'s rotary embedding is "{rope_type}", which is supported up to '
                f"{module.original_max_seq_len} tokens, not {length}.",
                hint="Choose a smaller --max-model-len.",
            )
        return "default"
    if rope_type != "longrope":
        return rope_type
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    arguments = {} if kind is None else {"layer_type": kind}
    frequencies, _ = ROPE_INIT_FUNCTIONS[rope_type](module.config, torch.device("cpu"), seq_len=length, **arguments)
    module.register_buffer("inv_freq" if kind is None else f"{kind}_inv_freq", frequencies, persistent=False)
    return "default"
