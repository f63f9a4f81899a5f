"""The attention layer, and the attention block of an ordinary decoder layer around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from llmkit.hookspecs.attention import AttentionLayer, Rotation
from llmkit.hookspecs.kernels import HeadNorms
from llmkit.layers.linear import QKVParallelLinear, RowParallelLinear
from llmkit.layers.module import Module
from llmkit.layers.norm import RMSNorm

if TYPE_CHECKING:
    from llmkit.layers.config import LayerOptions
    from llmkit.layers.context import ForwardContext, ModelContext
    from llmkit.layers.rotary import RotaryEmbedding


class Attention(Module):
    """Causal attention through whatever backend the forward pass carries.

    Registers itself in `context.attention_layers`; its place there is its index in metadata and caches.
    """

    def __init__(
        self,
        context: ModelContext,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        """Head counts are this worker's. scale: None for 1/sqrt(head_size)."""
        super().__init__()
        self.layer = AttentionLayer(
            index=len(context.attention_layers),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            scale=head_size**-0.5 if scale is None else scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
        context.attention_layers.append(self.layer)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """query [t, heads*head_size], key and value [t, kv_heads*head_size] → [t, heads*head_size]."""
        layer = self.layer
        tokens, index, size = query.shape[0], layer.index, layer.head_size
        output = context.backend.forward(
            layer,
            query.view(tokens, layer.num_heads, size),
            key.view(tokens, layer.num_kv_heads, size),
            value.view(tokens, layer.num_kv_heads, size),
            context.kv_caches[index],
            context.metadata[index],
        )
        return output.reshape(tokens, layer.num_heads * size)

    def attend(self, query: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """`forward` of tokens whose keys and values are in the cache already."""
        layer = self.layer
        tokens, index = query.shape[0], layer.index
        output = context.backend.attend(
            layer,
            query.view(tokens, layer.num_heads, layer.head_size),
            context.kv_caches[index],
            context.metadata[index],
        )
        return output.reshape(tokens, layer.num_heads * layer.head_size)

    def attend_projected(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        context: ForwardContext,
    ) -> torch.Tensor | None:
        """`forward` with the norms and the rotary embedding before it, if the backend takes such tokens."""
        layer, index = self.layer, self.layer.index
        cache, metadata = context.kv_caches[index], context.metadata[index]
        output = context.backend.attend_projected(layer, query, key, value, rotation, cache, metadata)
        return None if output is None else output.reshape(-1, layer.num_heads * layer.head_size)


class SelfAttention(Module):
    """Projections, optional norm of query and key heads, rotary embedding, attention, output projection."""

    def __init__(self, context: ModelContext, options: LayerOptions, rotary: RotaryEmbedding) -> None:
        super().__init__()
        config = context.config
        size = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            context,
            config.hidden_size,
            size,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=options.qkv_bias,
            fused=options.fused_weights,
        )
        self.o_proj = RowParallelLinear(
            context, config.num_attention_heads * size, config.hidden_size, bias=options.output_bias
        )
        self.has_qk_norm = options.qk_norm
        if options.qk_norm:
            self.q_norm = RMSNorm(context, size, config.rms_norm_eps, options.norm_offset)
            self.k_norm = RMSNorm(context, size, config.rms_norm_eps, options.norm_offset)
        self.rotary = rotary
        self._kernels = context.kernels
        self.attention = Attention(
            context,
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            size,
            scale=options.scale,
            sliding_window=options.sliding_window,
            soft_cap=options.soft_cap,
        )

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, context: ForwardContext, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """positions int64 [t], x [t, hidden_size] → [t, hidden_size]; with rows int64 [s] → theirs [s, hidden_size]."""
        return self.o_proj.forward(self.attended(positions, self.qkv_proj.forward(x), context, rows))

    def attended(
        self,
        positions: torch.Tensor,
        projected: torch.Tensor,
        context: ForwardContext,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What `o_proj` gets in `forward`, [t or s, heads*head_size], from what `qkv_proj` puts out, which may be
        overwritten."""
        query, key, value = torch.split(projected, self.qkv_proj.split_sizes, dim=-1)
        rotation = Rotation(positions, self.rotary.table_on(positions.device), self._norms())
        attended = self.attention.attend_projected(query, key, value, rotation, context)
        if attended is None:
            slots = context.backend.slots(context.metadata[self.attention.layer.index])
            if slots is not None and self._write_at_once(rotation, query, key, value, context, slots):
                attended = self.attention.attend(query, context)
            else:
                attended = self._one_by_one(positions, query, key, value, context)
        return attended if rows is None else attended[rows]

    def _write_at_once(
        self,
        rotation: Rotation,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: ForwardContext,
        slots: torch.Tensor,
    ) -> bool:
        """Norms, rotary embedding and the write to the cache in one kernel, if the kernel table has one."""
        cache = context.kv_caches[self.attention.layer.index]
        return self._kernels.rotary_and_write(
            rotation.positions, query, key, value, rotation.cos_sin, rotation.norms, cache, slots
        )

    def _norms(self) -> HeadNorms | None:
        if not self.has_qk_norm:
            return None
        query, key = self.q_norm.weight, self.k_norm.weight
        assert query is not None, "weights are loaded before the first step"
        assert key is not None
        return HeadNorms(query, key, self.q_norm.eps)

    def _one_by_one(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: ForwardContext,
    ) -> torch.Tensor:
        if self.has_qk_norm:
            tokens, size = len(query), self.attention.layer.head_size
            query = self.q_norm.forward(query.view(tokens, -1, size)).view(tokens, -1)
            key = self.k_norm.forward(key.view(tokens, -1, size)).view(tokens, -1)
        self.rotary.forward(positions, query, key)
        return self.attention.forward(query, key, value, context)
