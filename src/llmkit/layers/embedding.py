"""Token embedding and the head that turns hidden states into logits, tied or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from llmkit.layers.linear import rank_slice
from llmkit.layers.module import Module, WeightSlot
from llmkit.layers.stacked_weight import Shard, StackedWeight

if TYPE_CHECKING:
    from llmkit.layers.context import ModelContext
    from llmkit.layers.norm import RMSNorm


class _VocabularyWeight(Module):
    """This worker's rows of a matrix [vocab_size, hidden_size]."""

    def __init__(self, context: ModelContext, vocab_size: int, hidden_size: int, role: str) -> None:
        super().__init__()
        self.rows = rank_slice(vocab_size, context.parallel, "A vocabulary")
        self.weight = StackedWeight(context, [Shard(None, vocab_size, self.rows)], hidden_size, role=role)

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        yield f"{path}.weight", self.weight.slots()[0]

    def parameter_bytes(self) -> int:
        return self.weight.nbytes()


class VocabEmbedding(_VocabularyWeight):
    """Token ids → vectors. With several workers each looks up its own rows and the results are added up."""

    def __init__(self, context: ModelContext, vocab_size: int, hidden_size: int) -> None:
        super().__init__(context, vocab_size, hidden_size, "embedding")
        self._all_reduce = context.parallel.all_reduce if context.parallel.world_size > 1 else None

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids int64 [t] → [t, hidden_size]."""
        if self._all_reduce is None:
            return self.weight.embedding(input_ids)
        local = input_ids - self.rows.start
        mine = (local >= 0) & (local < self.weight.shape[0])
        vectors = self.weight.embedding(torch.where(mine, local, 0))
        return self._all_reduce(vectors * mine[:, None].to(vectors.dtype))

    def normed(self, input_ids: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(norm of `forward`, `forward`) in one kernel; None where there is none for them."""
        return None if self._all_reduce is not None else self.weight.embedding_norm(input_ids, norm)


class LMHead(_VocabularyWeight):
    """Hidden states → logits, with a weight of its own, or the embedding's (`tied_to`): one storage for both."""

    def __init__(
        self, context: ModelContext, vocab_size: int, hidden_size: int, tied_to: VocabEmbedding | None = None
    ) -> None:
        super().__init__(context, vocab_size, hidden_size, "lm_head")
        self.tied = tied_to is not None
        if tied_to is not None:
            self.weight = tied_to.weight
        self._all_gather = context.parallel.all_gather if context.parallel.world_size > 1 else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden_size] → float32 [n, vocab_size]."""
        return self.scores(hidden).float()

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `forward`, in the type of the product."""
        logits = self.weight.linear(hidden, None)
        return logits if self._all_gather is None else self._all_gather(logits)

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        return iter(()) if self.tied else super().weight_slots(path)

    def parameter_bytes(self) -> int:
        return 0 if self.tied else super().parameter_bytes()
