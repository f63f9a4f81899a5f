"""Front doors of the backends around attention libraries that have no objection to a machine without a GPU: for
Triton's interpreter, with stand-ins for the libraries."""

from __future__ import annotations

from llmkit.hookspecs import PluginInfo, hookimpl


class FlashInfer:
    info = PluginInfo(summary="FlashInfer in tests")

    @staticmethod
    @hookimpl
    def llmkit_attention_backend():
        from llmkit_attention.flashinfer_backend import FlashInferAttention

        return FlashInferAttention(workspace_mib=1)


class FlashAttn:
    """The library for every step with more than one token in a row."""

    info = PluginInfo(summary="FlashAttention in tests")

    @staticmethod
    @hookimpl
    def llmkit_attention_backend():
        from llmkit_attention.flash_attn_backend import FlashAttnAttention

        return FlashAttnAttention(least_tokens=1)
