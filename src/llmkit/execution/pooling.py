"""Embeddings of prompts, for the requests that ask for one, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from llmkit.sampling.device_draw import NOT_FINITE
from llmkit.sampling.sampler import FAILURES

if TYPE_CHECKING:
    from llmkit.requests.message import Pooling
    from llmkit.scheduling.plan import AddedRow, StepPlan, StepResult


@dataclass(slots=True)
class _Wish:
    """total: sum over the hidden states so far, float32 [hidden_size]; None before the first."""

    pooling: Pooling
    num_prompt_tokens: int
    total: torch.Tensor | None = None


class Pooler:
    """Makes one vector of a prompt's hidden states: the last one, or the mean of all.

    A mean needs every state, so its prompt is computed from the start, in any number of chunks.
    """

    def __init__(self) -> None:
        self._wishes: dict[int, _Wish] = {}

    def add(self, row: AddedRow) -> None:
        self.remove(row.slot)
        if row.request.pooling is not None:
            self._wishes[row.slot] = _Wish(row.request.pooling, row.num_prompt_tokens)

    def remove(self, slot: int) -> None:
        self._wishes.pop(slot, None)

    @property
    def wants_any(self) -> bool:
        """Whether a sequence of the batch has asked for an embedding."""
        return bool(self._wishes)

    def pool(self, plan: StepPlan, hidden: torch.Tensor, result: StepResult) -> None:
        """Fill `result.embeddings` for the prompts that this step completes. hidden: of all tokens of the step,
        [t, hidden_size]."""
        if not self._wishes:
            return
        start = 0
        for row, (slot, computed, new) in enumerate(
            zip(plan.slots.tolist(), plan.num_computed.tolist(), plan.num_new.tolist(), strict=True)
        ):
            wish = self._wishes.get(slot)
            if wish is not None:
                vector = _pooled(wish, hidden[start : start + new], computed + new)
                if vector is not None:
                    _deliver(vector, row, result)
            start += new


def _pooled(wish: _Wish, hidden: torch.Tensor, end: int) -> torch.Tensor | None:
    """The prompt's vector, once its last token, at `end`, is among `hidden`."""
    if wish.pooling == "mean":
        total = hidden.float().sum(0)
        wish.total = total if wish.total is None else wish.total + total
    if end < wish.num_prompt_tokens:
        return None
    return hidden[-1].float() if wish.total is None else wish.total / wish.num_prompt_tokens


def _deliver(vector: torch.Tensor, row: int, result: StepResult) -> None:
    values = vector.cpu()
    if torch.isfinite(values).all():
        result.embeddings[row] = values.tolist()
    else:
        result.failed[row] = FAILURES[NOT_FINITE]
