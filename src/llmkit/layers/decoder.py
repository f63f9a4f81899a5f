"""An ordinary pre-norm decoder, put together from a configuration and a few options per layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from llmkit.layers.attention import SelfAttention
from llmkit.layers.causal_lm import CausalLM
from llmkit.layers.config import DecoderConfig, LayerOptions
from llmkit.layers.embedding import LMHead, VocabEmbedding
from llmkit.layers.linear import added_up
from llmkit.layers.mlp import GatedMLP
from llmkit.layers.module import Module
from llmkit.layers.moe import SparseMLP
from llmkit.layers.norm import RMSNorm
from llmkit.layers.rotary import RotaryEmbedding
from llmkit.layers.weight_loader import load_into

if TYPE_CHECKING:
    from llmkit.layers.context import ForwardContext, ModelContext

LayerChoice = Callable[[DecoderConfig, int], LayerOptions]


class DecoderLayer(Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream; with `options.output_norms`
    each between two norms. The names are those of the checkpoints: `post_attention_layernorm` is then the norm of
    what attention puts out, else the one before the feed-forward block."""

    def __init__(self, context: ModelContext, options: LayerOptions, rotary: RotaryEmbedding) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(context, context.config.hidden_size, context.config.rms_norm_eps, options.norm_offset)

        self.input_layernorm = norm()
        self.self_attn = SelfAttention(context, options, rotary)
        self.post_attention_layernorm = norm()
        self.has_output_norms = options.output_norms
        if options.output_norms:
            self.pre_feedforward_layernorm = norm()
            self.post_feedforward_layernorm = norm()
        block: SparseMLP | GatedMLP = (
            GatedMLP(context, bias=options.mlp_bias, fused=options.fused_weights)
            if options.experts is None
            else SparseMLP(context, options.experts)
        )
        self.add_module(options.feed_forward, block)
        self._feed_forward, self._feed_forward_after = block.forward, block.after_norm

    def forward(
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
        rows: torch.Tensor | None = None,
        normed: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [t, hidden_size]: what is not yet added to `residual` (None: nothing was, hidden is all), or what
        `RowParallelLinear.before_norm` returns for it.

        Returns the same pair after this layer: adding is left to the next norm, which does both in one pass. rows
        int64 [s]: the tokens to go on with behind attention, None for all. normed: the input norm of hidden, if that
        is there already and residual is None.
        """
        if residual is None:
            normed = self.input_layernorm.forward(hidden) if normed is None else normed
            projected, residual = self.self_attn.qkv_proj.forward(normed), hidden
        else:
            projected, residual = self.self_attn.qkv_proj.after_norm(self.input_layernorm, hidden, residual)
        attended = self.self_attn.attended(positions, projected, context, rows)
        if rows is not None:
            residual = residual[rows]
        if self.has_output_norms:
            hidden = self.post_attention_layernorm.forward(self.self_attn.o_proj.forward(attended))
            hidden, residual = self.pre_feedforward_layernorm.add(hidden, residual)
            return self.post_feedforward_layernorm.forward(self._feed_forward(hidden)), residual
        hidden = self.self_attn.o_proj.before_norm(attended)
        return self._feed_forward_after(self.post_attention_layernorm, hidden, residual)


class DecoderModel(Module):
    """Embedding, the decoder layers of `context.layer_range` (all by default) and the final norm.

    The embedding is built where layer 0 is, the norm where the last layer is, so a pipeline stage holds no more
    than it needs. Layers with the same rotary parameters share one table. embedding_scale: what the vectors of tokens
    are multiplied by, rounded to the model's type.
    """

    def __init__(self, context: ModelContext, options: LayerChoice, embedding_scale: float | None = None) -> None:
        super().__init__()
        config = context.config
        count = config.num_hidden_layers
        indices = context.layer_range if context.layer_range is not None else range(count)
        of_layer = {i: options(config, i) for i in indices}
        ropes = {i: config.rope_of_layer(i) for i in indices}
        rotary = {rope: RotaryEmbedding(context, rope) for rope in dict.fromkeys(ropes.values())}
        self.embed_tokens = (
            VocabEmbedding(context, config.vocab_size, config.hidden_size)
            if 0 in indices or (config.tie_word_embeddings and count - 1 in indices)
            else None
        )
        self.layers = nn.ModuleDict({str(i): DecoderLayer(context, of_layer[i], rotary[ropes[i]]) for i in indices})
        self.norm: RMSNorm | None = None
        if count - 1 in indices:
            offset = of_layer[count - 1].norm_offset
            self.norm = RMSNorm(context, config.hidden_size, config.rms_norm_eps, offset)
        self.embedding_scale = (
            None if embedding_scale is None else torch.tensor(embedding_scale, dtype=context.dtype).item()
        )
        self.is_first = 0 in indices
        self._stack = tuple(self.layers.values())

    def forward(
        self,
        inputs: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        context: ForwardContext,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """inputs: token ids int64 [t] in the first stage, else the pair that the stage before returned.

        Returns hidden states [t, hidden_size] after the final norm in the last stage, else (hidden, residual).
        """
        residual: torch.Tensor | None = None
        normed: torch.Tensor | None = None
        if isinstance(inputs, tuple):
            hidden, residual = inputs
        else:
            hidden, normed = self._embedded(inputs, context)
        if residual is None and self.norm is not None and context.replayer is not None:
            return context.replayer.run(partial(self._all_layers, context), hidden)
        hidden, residual = self._run_layers(positions, hidden, residual, context, normed)
        if self.norm is None:
            return added_up(hidden, residual.dtype), residual
        return self.norm.add(hidden, residual)[0]

    def _embedded(self, input_ids: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The vectors of tokens, and the first layer's norm of them where one kernel makes both."""
        assert self.embed_tokens is not None, "token ids go to the stage that holds the embedding"
        first = self._stack[0]
        if self.embedding_scale is None and context.replayer is None and isinstance(first, DecoderLayer):
            done = self.embed_tokens.normed(input_ids, first.input_layernorm)
            if done is not None:
                return done[1], done[0]
        hidden = self.embed_tokens.forward(input_ids)
        return (hidden if self.embedding_scale is None else hidden * self.embedding_scale), None

    def _all_layers(self, context: ForwardContext, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """From the embedding to what the final norm puts out."""
        assert self.norm is not None
        return self.norm.add(*self._run_layers(positions, hidden, None, context))[0]

    def _run_layers(
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
        normed: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self._stack[:-1]:
            hidden, residual = layer.forward(positions, hidden, residual, context, normed=normed)
            normed = None
        rows = context.output_rows if self.norm is not None else None
        hidden, residual = self._stack[-1].forward(positions, hidden, residual, context, rows, normed)
        assert residual is not None, "a stage has at least one layer"
        return hidden, residual


class DecoderForCausalLM(CausalLM):
    """The whole model. What is particular to an architecture comes in through the arguments.

    options: (config, layer index) → LayerOptions, called once a layer; None: plain layers.
    defaults: config.json keys and the values that a missing one has in this architecture; with them
    `context.config` is read anew.
    rename: checkpoint name → the name used here ("model.layers.0.mlp.gate_proj.weight"), None: skip the tensor.
    embedding_scale: the vectors of tokens are multiplied by it. logit_soft_cap c: logits become c * tanh(logits / c).
    """

    def __init__(
        self,
        context: ModelContext,
        options: LayerChoice | None = None,
        *,
        defaults: dict[str, object] | None = None,
        rename: Callable[[str], str | None] | None = None,
        embedding_scale: float | None = None,
        logit_soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        if defaults:
            context.config = context.config.with_defaults(defaults)
        config = context.config
        self.config = config
        self.model = DecoderModel(context, options or _plain_layer, embedding_scale)
        self.lm_head: LMHead | None = None
        if self.model.norm is not None:
            tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
            self.lm_head = LMHead(context, config.vocab_size, config.hidden_size, tied_to)
        self.logit_soft_cap = logit_soft_cap
        self._rename = rename
        self._is_partial = context.layer_range is not None

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        hidden = self.model.forward(input_ids, positions, context)
        assert isinstance(hidden, torch.Tensor), "a pipeline stage is run through .model"
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.lm_head is not None, "logits come from the last pipeline stage"
        logits = self.lm_head.forward(hidden)
        if self.logit_soft_cap is not None:
            logits = torch.tanh(logits / self.logit_soft_cap) * self.logit_soft_cap
        return logits

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.logit_soft_cap is not None:
            return self.logits(hidden)
        assert self.lm_head is not None, "logits come from the last pipeline stage"
        return self.lm_head.scores(hidden)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        tied = self.lm_head is not None and self.lm_head.tied
        load_into(
            self,
            tensors,
            rename=self._rename,
            # A tied head is the embedding: whatever else the file has under this name must not replace it.
            ignore=frozenset({"lm_head.weight"}) if tied else frozenset(),
            allow_unknown_layers=self._is_partial,
        )

    def parameter_bytes(self) -> int:
        """Bytes that all weights will take once loaded; known before anything is loaded."""
        return sum(m.parameter_bytes() for m in self.modules() if isinstance(m, Module) and m is not self)


def _plain_layer(_config: DecoderConfig, _index: int) -> LayerOptions:
    return LayerOptions()
