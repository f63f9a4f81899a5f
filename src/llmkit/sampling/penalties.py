"""Presence, frequency and repetition penalties.

Presence and frequency look at the answer only (OpenAI API reference, "frequency and presence penalties"); repetition
looks at prompt and answer (Keskar et al., "CTRL", 2019, section 4.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from llmkit.sampling.chunks import chunk_rows
from llmkit.sampling.parameters import SlotArray

if TYPE_CHECKING:
    from llmkit.scheduling.plan import AddedRow

_FIRST_CAPACITY = 4


@dataclass(frozen=True)
class Penalties:
    """Penalties of n rows, float32[n] on the logits' device."""

    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor

    def part(self, rows: slice) -> Penalties:
        """Those of some of the rows."""
        return Penalties(self.presence[rows], self.frequency[rows], self.repetition[rows])


class TokenCounts:
    """Which tokens stand in the prompt and how often each stands in the answer, for slots with penalties only.

    Rows of the two tensors are handed out on demand; the tensors double when all are taken.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._row_of_slot: SlotArray = np.full(max_num_seqs, -1, dtype=np.int64)
        self._free: list[int] = []
        self._output = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    def set(self, added: AddedRow) -> None:
        """Count the tokens of a sequence that enters the batch; also after preemption, when it has some output."""
        row = int(self._row_of_slot[added.slot])
        if row < 0:
            if not self._free:
                self._grow()
            row = self._free.pop()
            self._row_of_slot[added.slot] = row
        device = self._output.device
        tokens = torch.tensor(added.token_ids, dtype=torch.int64, device=device)
        prompt, output = tokens[: added.num_prompt_tokens], tokens[added.num_prompt_tokens :]
        self._prompt[row] = False
        self._prompt[row, prompt] = True
        self._output[row] = torch.bincount(output, minlength=self._output.shape[1]).to(torch.int32)

    def remove(self, slot: int) -> None:
        row = int(self._row_of_slot[slot])
        if row >= 0:
            self._free.append(row)
            self._row_of_slot[slot] = -1

    def record(self, slots: SlotArray, token_ids: torch.Tensor) -> None:
        """Count sampled tokens int64[n], one for each of `slots` [n]; no slot twice."""
        rows = self._rows(slots)
        self._output[rows, token_ids] += 1

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: SlotArray, penalties: Penalties) -> None:
        """Penalise rows `rows` int64[m] of logits float32[n, v], which belong to `slots` [m], in place."""
        counters = self._rows(slots)
        size = chunk_rows(logits)
        for start in range(0, len(slots), size):
            part = slice(start, start + size)
            logits[rows[part]] = self._penalised(logits[rows[part]], counters[part], penalties.part(part))

    def _penalised(self, logits: torch.Tensor, counters: torch.Tensor, penalties: Penalties) -> torch.Tensor:
        counts = self._output[counters]
        in_output = counts > 0
        factors = torch.where(in_output | self._prompt[counters], penalties.repetition.unsqueeze(-1), 1.0)
        # Dividing a positive and multiplying a negative logit both make the token less likely.
        penalised = torch.where(logits > 0, logits / factors, logits * factors)
        penalised -= counts * penalties.frequency.unsqueeze(-1)
        penalised -= in_output * penalties.presence.unsqueeze(-1)
        return penalised

    def _rows(self, slots: SlotArray) -> torch.Tensor:
        return torch.from_numpy(self._row_of_slot[slots]).to(self._output.device)

    def _grow(self) -> None:
        old = len(self._output)
        new = max(_FIRST_CAPACITY, 2 * old)
        vocab_size, device = self._output.shape[1], self._output.device
        output = torch.zeros((new, vocab_size), dtype=torch.int32, device=device)
        prompt = torch.zeros((new, vocab_size), dtype=torch.bool, device=device)
        output[:old], prompt[:old] = self._output, self._prompt
        self._output, self._prompt = output, prompt
        self._free.extend(range(new - 1, old - 1, -1))
