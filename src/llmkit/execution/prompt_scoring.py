"""Log-probabilities of prompt tokens, for the requests that ask for them, chunk by chunk."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from llmkit.sampling.device_draw import NOT_FINITE
from llmkit.sampling.logprobs import position_logprobs
from llmkit.sampling.sampler import FAILURES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llmkit.layers.causal_lm import CausalLM
    from llmkit.requests.logprobs import PositionLogprobs
    from llmkit.scheduling.plan import AddedRow, IntArray, StepPlan, StepResult

_LOGITS_AT_A_TIME = 1 << 22
"""Entries of the largest logits tensor: a long chunk of a prompt must not take gigabytes."""


@dataclass(frozen=True)
class _Wish:
    num_logprobs: int
    num_prompt_tokens: int


class PromptScorer:
    """Hidden state p of a prompt scores token p + 1; the first token of a prompt has no score."""

    def __init__(self, model: CausalLM, token_ids: IntArray, vocab_size: int) -> None:
        self._model = model
        self._token_ids = token_ids
        self._chunk = max(1, _LOGITS_AT_A_TIME // vocab_size)
        self._wishes: dict[int, _Wish] = {}

    def add(self, row: AddedRow) -> None:
        wanted = row.request.sampling_params.prompt_logprobs
        self.remove(row.slot)
        if wanted is not None:
            self._wishes[row.slot] = _Wish(wanted, row.num_prompt_tokens)

    def remove(self, slot: int) -> None:
        self._wishes.pop(slot, None)

    @property
    def wants_any(self) -> bool:
        """Whether a sequence of the batch has asked for scores of its prompt."""
        return bool(self._wishes)

    def score(self, plan: StepPlan, hidden: torch.Tensor, result: StepResult) -> None:
        """Fill `result.prompt_logprobs` from the step's hidden states [t, hidden_size].

        Entry j of a row belongs to prompt position num_computed + 1 + j; a row without new positions has no key.
        """
        if not self._wishes:
            return
        start = 0
        for row, (slot, computed, new) in enumerate(
            zip(plan.slots.tolist(), plan.num_computed.tolist(), plan.num_new.tolist(), strict=True)
        ):
            wish = self._wishes.get(slot)
            count = min(new, wish.num_prompt_tokens - 1 - computed) if wish is not None else 0
            if wish is not None and count > 0:
                targets = self._token_ids[slot, computed + 1 : computed + 1 + count]
                entries = list(self._entries(hidden[start : start + count], targets, wish.num_logprobs))
                if any(math.isnan(entry.logprobs[0]) for entry in entries):
                    result.failed[row] = FAILURES[NOT_FINITE]
                else:
                    result.prompt_logprobs[row] = entries
            start += new

    def _entries(self, hidden: torch.Tensor, targets: IntArray, num_logprobs: int) -> Iterator[PositionLogprobs]:
        for start in range(0, len(targets), self._chunk):
            logits = self._model.logits(hidden[start : start + self._chunk])
            chunk = torch.from_numpy(targets[start : start + self._chunk]).to(logits.device, torch.int64)
            yield from position_logprobs(logits, chunk, [num_logprobs] * len(chunk))
