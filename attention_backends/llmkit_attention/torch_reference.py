"""Front door of the `torch` attention backend: the reference, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.hookspecs import PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmkit.hookspecs.attention import AttentionBackend

info = PluginInfo(summary="paged attention in plain torch, on any device; simple and slow, the reference")


@hookimpl
def llmkit_attention_backend() -> AttentionBackend:
    from llmkit_attention.torch_backend import TorchAttention

    return TorchAttention()
