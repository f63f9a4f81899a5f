"""llmkit's attention under transformers' attention interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from llmkit.errors import EngineError

if TYPE_CHECKING:
    from llmkit.hookspecs.attention import AttentionLayer
    from llmkit.layers.context import ForwardContext

INTERFACE = "llmkit"
"""What transformers calls it. There is no mask function of this name, so no masks are made."""

_LAYER = "llmkit_layer"
_PASS = "llmkit_pass"


class ForwardPass:
    """Carries the context of the forward pass that is running to the attention calls inside it."""

    def __init__(self) -> None:
        self.context: ForwardContext | None = None


def attach(module: torch.nn.Module, layer: AttentionLayer, forward_pass: ForwardPass) -> None:
    """Make an attention module of a model answer to llmkit."""
    setattr(module, _LAYER, layer)
    setattr(module, _PASS, forward_pass)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, t, head_size], key and value [1, kv_heads, t, head_size], rotated → [1, t, heads, head_size].

    Windows, caps and scales are not taken from the call but from the layer that was made of such a call beforehand.
    """
    layer: AttentionLayer = getattr(module, _LAYER)
    context: ForwardContext | None = getattr(module, _PASS).context
    if context is None:
        raise EngineError("An attention layer was called outside of a forward pass.")
    output = context.backend.forward(
        layer,
        query[0].transpose(0, 1).contiguous(),
        key[0].transpose(0, 1).contiguous(),
        value[0].transpose(0, 1).contiguous(),
        context.kv_caches[layer.index],
        context.metadata[layer.index],
    )
    return output.unsqueeze(0), None


def register(name: str, function: Callable[..., Any]) -> None:
    """Make `function` known to transformers as an attention implementation. Registering again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, function)
