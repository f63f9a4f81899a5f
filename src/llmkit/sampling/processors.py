"""Everything that changes logits before a token is drawn: grammar, restriction, bias, banned words, minimum length,
penalties.

Applied in this order. The result is the distribution that log-probabilities are reported of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from llmkit.sampling import parameters
from llmkit.sampling.masks import BannedSequences, SlotEntries, TokenMasks, add_bias, allow_only, apply_masks, forbid
from llmkit.sampling.parameters import SlotArray, SlotParameters
from llmkit.sampling.penalties import Penalties, TokenCounts

if TYPE_CHECKING:
    from llmkit.scheduling.plan import AddedRow


class LogitsProcessors:
    """Per-slot state of all processors. `token_ids` int32[max_num_seqs, max_model_len] is the batch's token buffer,
    read only: the answer so far of a row is token_ids[slot, num_prompt_tokens:position]."""

    def __init__(self, params: SlotParameters, token_ids: SlotArray, vocab_size: int, device: torch.device) -> None:
        self._params = params
        self._token_ids = token_ids
        self._device = device
        self._allowed = SlotEntries(vocab_size, device)
        self._bias = SlotEntries(vocab_size, device)
        self._stops = SlotEntries(vocab_size, device)
        self._banned = BannedSequences(vocab_size)
        self._counts = TokenCounts(len(params.needs), vocab_size, device)

    def add(self, row: AddedRow) -> None:
        """Take over what the sequence needs; its parameters are in the slot arrays already."""
        request, params, slot = row.request, row.request.sampling_params, row.slot
        needs = int(self._params.needs[slot])
        if needs & parameters.RESTRICTED:
            self._allowed.set(slot, dict.fromkeys(params.allowed_token_ids or ()))
        if needs & parameters.BIASED and params.logit_bias:
            self._bias.set(slot, params.logit_bias.keys(), params.logit_bias.values())
        if needs & parameters.MIN_TOKENS:
            self._stops.set(slot, sorted(request.stop_token_ids))
        if needs & parameters.BANNED:
            self._banned.set(slot, request.bad_words_ids)
        if needs & parameters.PENALISED:
            self._counts.set(row)

    def remove(self, slot: int) -> None:
        for entries in (self._allowed, self._bias, self._stops):
            entries.remove(slot)
        self._banned.remove(slot)
        self._counts.remove(slot)

    def apply(
        self,
        logits: torch.Tensor,
        slots: SlotArray,
        positions: SlotArray,
        needs: SlotArray,
        masks: TokenMasks | None = None,
    ) -> None:
        """Process logits float32[n, v] in place.

        slots, positions, needs [n]: the rows' slots, the absolute positions of the tokens to be sampled, flags.
        masks: of the rows with a grammar.
        """
        if masks is not None:
            apply_masks(logits, masks)
        self._restrict(logits, slots, needs)
        biased = self._rows(needs, parameters.BIASED)
        if len(biased):
            add_bias(logits, *self._bias.joined(biased, slots[biased]))
        self._ban(logits, slots, positions, needs)
        self._hold_back_stops(logits, slots, positions, needs)
        self._penalise(logits, slots, needs)

    def record(self, slots: SlotArray, needs: SlotArray, token_ids: torch.Tensor) -> None:
        """Take note of sampled tokens int64[n]."""
        rows = self._rows(needs, parameters.PENALISED)
        if len(rows):
            chosen = token_ids if len(rows) == len(slots) else token_ids[self._to_device(rows)]
            self._counts.record(slots[rows], chosen)

    def _rows(self, needs: SlotArray, flag: int) -> SlotArray:
        return np.flatnonzero(needs & flag)

    def _to_device(self, array: SlotArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def _restrict(self, logits: torch.Tensor, slots: SlotArray, needs: SlotArray) -> None:
        rows = self._rows(needs, parameters.RESTRICTED)
        if len(rows):
            row_ids, tokens, _ = self._allowed.joined(rows, slots[rows])
            allow_only(logits, self._to_device(rows), row_ids, tokens)

    def _ban(self, logits: torch.Tensor, slots: SlotArray, positions: SlotArray, needs: SlotArray) -> None:
        rows = self._rows(needs, parameters.BANNED)
        if not len(rows):
            return
        lists = []
        for row in rows.tolist():
            slot = int(slots[row])
            start = int(self._params.num_prompt_tokens[slot])
            lists.append(self._banned.banned(slot, self._token_ids[slot, start : int(positions[row])]))
        row_ids = np.repeat(rows, [len(tokens) for tokens in lists])
        if len(row_ids):
            forbid(logits, self._to_device(row_ids), self._to_device(np.concatenate(lists)))

    def _hold_back_stops(self, logits: torch.Tensor, slots: SlotArray, positions: SlotArray, needs: SlotArray) -> None:
        rows = self._rows(needs, parameters.MIN_TOKENS)
        if len(rows):
            lengths = positions[rows] - self._params.num_prompt_tokens[slots[rows]]
            rows = rows[lengths < self._params.min_tokens[slots[rows]]]
        if len(rows):
            row_ids, tokens, _ = self._stops.joined(rows, slots[rows])
            forbid(logits, row_ids, tokens)

    def _penalise(self, logits: torch.Tensor, slots: SlotArray, needs: SlotArray) -> None:
        rows = self._rows(needs, parameters.PENALISED)
        if not len(rows):
            return
        chosen, row_ids = slots[rows], self._to_device(rows)
        penalties = Penalties(
            presence=self._to_device(self._params.presence[chosen]),
            frequency=self._to_device(self._params.frequency[chosen]),
            repetition=self._to_device(self._params.repetition[chosen]),
        )
        self._counts.apply(logits, row_ids, chosen, penalties)
