"""llmkit's linear layers and embeddings in the place of torch's: kernels and quantization reach the model that way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from llmkit.layers.embedding import LMHead, VocabEmbedding
from llmkit.layers.linear import Linear
from llmkit.layers.stacked_weight import StackedWeight

if TYPE_CHECKING:
    from llmkit.layers.context import ModelContext


class _Hosted(nn.Module):
    """Has a weight for code of the model that looks at its type; there is none once it is packed."""

    held: StackedWeight

    @property
    def weight(self) -> torch.Tensor:
        if self.held.plain is None:
            raise AttributeError("the weight is packed or not loaded")
        return self.held.plain


class HostedLinear(_Hosted):
    """A linear layer on inputs of any number of dimensions."""

    def __init__(self, inner: Linear, in_features: int, out_features: int) -> None:
        super().__init__()
        self.inner = inner
        self.held = inner.weight
        self.in_features, self.out_features = in_features, out_features

    @property
    def bias(self) -> torch.Tensor | None:
        return self.inner.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] → [..., out_features]."""
        rows = x.reshape(-1, self.in_features)
        return self.inner.forward(rows).view(*x.shape[:-1], self.out_features)


class HostedEmbedding(_Hosted):
    """Token ids int64 [1, t] → [1, t, hidden size]."""

    def __init__(self, inner: VocabEmbedding) -> None:
        super().__init__()
        self.inner = inner
        self.held = inner.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.inner.forward(input_ids.reshape(-1)).view(*input_ids.shape, -1)


class HostedHead(_Hosted):
    """Hidden states [1, n, hidden size] → float32 [1, n, vocabulary]."""

    def __init__(self, inner: LMHead) -> None:
        super().__init__()
        self.inner = inner
        self.held = inner.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner.forward(hidden[0]).unsqueeze(0)


def host_linears(model: Any, context: ModelContext, tied: bool) -> None:
    """Replace every plain linear layer of `model`, and its token embedding and head where they are plain as well.

    Subclasses stay, for they do something of their own, and layers of another type than the model's. tied: head and
    embedding have one weight.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    replaced: dict[nn.Module, nn.Module] = {}
    can_tie = type(head) is nn.Linear and head.bias is None
    if type(embedding) is nn.Embedding and (can_tie or not tied):
        hosted = VocabEmbedding(context, *embedding.weight.shape)
        replaced[embedding] = HostedEmbedding(hosted)
        if tied:
            replaced[head] = HostedHead(LMHead(context, *embedding.weight.shape, hosted))
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype is context.dtype and not (module is head and tied):
            n, k = module.weight.shape
            role = "lm_head" if module is head else "linear"
            inner = Linear(context, k, n, bias=module.bias is not None, role=role)
            replaced[module] = HostedLinear(inner, k, n)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in replaced:
                setattr(parent, name, replaced[child])
