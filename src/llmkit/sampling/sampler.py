"""From logits to tokens: process, report, draw."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from llmkit.sampling import parameters
from llmkit.sampling.device_draw import NOT_FINITE
from llmkit.sampling.drawing import Draws, draw
from llmkit.sampling.logprobs import position_logprobs
from llmkit.sampling.masks import TokenMasks
from llmkit.sampling.ordering import best_indices
from llmkit.sampling.parameters import SlotArray, SlotParameters
from llmkit.sampling.processors import LogitsProcessors

if TYPE_CHECKING:
    from llmkit.requests.logprobs import PositionLogprobs
    from llmkit.scheduling.plan import AddedRow

NOTHING_ALLOWED = -2
FAILURES = {
    NOT_FINITE: "The model's logits for this sequence are not finite (NaN or infinity), so no token can be chosen.",
    NOTHING_ALLOWED: "structured_outputs, allowed_token_ids, bad_words and min_tokens together leave no token that may "
    "be chosen.",
}


@dataclass
class SampledTokens:
    """Of n sampled rows: token_ids int64[n] on the host, -1 for failed rows; entries and messages by row."""

    token_ids: SlotArray
    logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Sampling state of all slots, and the sampling of a step's rows.

    A token depends on its row's logits, parameters, seed, tokens so far and absolute position only.
    `token_ids` int32[max_num_seqs, max_model_len] is the batch's token buffer, which the sampler only reads.
    """

    def __init__(self, token_ids: SlotArray, vocab_size: int, device: torch.device) -> None:
        self._params = SlotParameters(len(token_ids), vocab_size)
        self._processors = LogitsProcessors(self._params, token_ids, vocab_size, device)

    def add(self, row: AddedRow) -> None:
        """A sequence enters the batch; whatever its slot held before is forgotten."""
        self.remove(row.slot)
        self._params.add(row)
        self._processors.add(row)

    @property
    def params(self) -> SlotParameters:
        """Parameters by slot; the sampler alone changes them."""
        return self._params

    def remove(self, slot: int) -> None:
        """The slot's sequence has left the batch."""
        self._params.needs[slot] = 0
        self._processors.remove(slot)

    def sample(
        self, logits: torch.Tensor, slots: SlotArray, positions: SlotArray, masks: TokenMasks | None = None
    ) -> SampledTokens:
        """Sample one token for each row of logits float32[n, v], which are overwritten.

        slots [n]: the rows' slots, no slot twice; positions [n]: absolute positions that the tokens will have; masks:
        of the rows whose request has a grammar.
        """
        needs = self._params.needs[slots]
        all_needs = int(np.bitwise_or.reduce(needs)) if len(needs) else 0
        best = best_indices(logits)
        outcome = torch.where(_values(logits, best).isfinite(), best, NOT_FINITE)
        if all_needs:
            outcome = self._choose(logits, outcome, Draws(slots, positions, needs), all_needs, masks)
        sampled = _on_host(outcome)
        if all_needs & parameters.LOGPROBS:
            sampled.logprobs.update(self._logprobs(logits, sampled, slots, needs))
        return sampled

    def process(
        self, logits: torch.Tensor, slots: SlotArray, positions: SlotArray, masks: TokenMasks | None = None
    ) -> torch.Tensor:
        """The part of `sample` before tokens are drawn, in place; whether each row's logits are usable at all, bool[n].
        Waits for nothing."""
        usable = logits.amax(dim=-1).isfinite()
        needs = self._params.needs[slots]
        if int(np.bitwise_or.reduce(needs)) & parameters.PROCESSED:
            self._processors.apply(logits, slots, positions, needs, masks)
        return usable

    def record(self, slots: SlotArray, token_ids: torch.Tensor) -> None:
        """Take note of the tokens int64[n] that were drawn after `process`, on their device."""
        self._processors.record(slots, self._params.needs[slots], token_ids)

    def _choose(
        self, logits: torch.Tensor, outcome: torch.Tensor, rows: Draws, all_needs: int, masks: TokenMasks | None
    ) -> torch.Tensor:
        """Outcome int64[n] of rows of which some need more than the best of their own logits."""
        usable = outcome != NOT_FINITE
        token_ids, possible = outcome, usable
        if all_needs & parameters.PROCESSED:
            self._processors.apply(logits, rows.slots, rows.positions, rows.needs, masks)
            token_ids = best_indices(logits)
            possible = _values(logits, token_ids) > -torch.inf
        if all_needs & parameters.RANDOM:
            token_ids = self._draw(logits, token_ids, rows, keep=bool(all_needs & parameters.LOGPROBS))
        if all_needs & parameters.PENALISED:
            self._processors.record(rows.slots, rows.needs, token_ids.clamp(min=0))
        return torch.where(usable, torch.where(possible, token_ids, NOTHING_ALLOWED), NOT_FINITE)

    def _draw(self, logits: torch.Tensor, greedy: torch.Tensor, rows: Draws, *, keep: bool) -> torch.Tensor:
        """Token ids with those of rows that draw replaced; `keep`: the logits are still needed."""
        random = np.flatnonzero(rows.needs & parameters.RANDOM)
        if len(random) == len(rows.needs):
            return draw(logits.clone() if keep else logits, rows, self._params)
        row_ids = torch.from_numpy(random).to(logits.device)
        drawing = Draws(rows.slots[random], rows.positions[random], rows.needs[random])
        return greedy.index_copy(0, row_ids, draw(logits[row_ids], drawing, self._params))

    def _logprobs(
        self, logits: torch.Tensor, sampled: SampledTokens, slots: SlotArray, needs: SlotArray
    ) -> dict[int, PositionLogprobs]:
        rows = np.flatnonzero((needs & parameters.LOGPROBS).astype(bool) & (sampled.token_ids >= 0))
        if not len(rows):
            return {}
        subset = logits if len(rows) == len(logits) else logits[torch.from_numpy(rows).to(logits.device)]
        token_ids = torch.from_numpy(sampled.token_ids[rows]).to(logits.device)
        entries = position_logprobs(subset, token_ids, self._params.num_logprobs[slots[rows]].tolist())
        return dict(zip(rows.tolist(), entries, strict=True))


def _values(logits: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return logits.gather(-1, indices.unsqueeze(-1)).squeeze(-1)


def _on_host(outcome: torch.Tensor) -> SampledTokens:
    """The one copy to the host; reasons of failure become messages."""
    codes = outcome.cpu().numpy()
    failed = {int(row): FAILURES[int(codes[row])] for row in np.flatnonzero(codes < 0)}
    return SampledTokens(np.maximum(codes, -1), failed=failed)
