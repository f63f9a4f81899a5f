"""What the device knows of every slot: its last token, and what its draws depend on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from llmkit.execution.staging import StagingBuffer
from llmkit.sampling.device_draw import DeviceDraws, DeviceTruncation

if TYPE_CHECKING:
    from llmkit.sampling.parameters import SlotParameters
    from llmkit.scheduling.plan import IntArray


class SlotState:
    """Arrays by slot on the device; slot `scratch`, behind the last, belongs to nobody: padding goes there.

    A token id below 0 in a step's inputs is a placeholder, -1 - slot: it stands for the token that was sampled last
    for the slot, which the host may not know yet.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.scratch = max_num_seqs
        self._last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self._seeds = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self._temperatures = torch.zeros(max_num_seqs + 1, dtype=torch.float32, device=device)
        self._log_min_p = torch.full((max_num_seqs + 1,), -torch.inf, device=device)
        self._top_k = torch.full((max_num_seqs + 1,), vocab_size, dtype=torch.int64, device=device)
        self._top_p = torch.ones(max_num_seqs + 1, dtype=torch.float64, device=device)
        self._staging = StagingBuffer(device)

    def set(self, slots: IntArray, params: SlotParameters) -> None:
        """Bring the parameters of `slots` [k] to the device, in one copy."""
        count = len(slots)
        host = self._staging.layout(
            {
                "slots": (np.int64, (count,)),
                "seeds": (np.int64, (count,)),
                "temperatures": (np.float32, (count,)),
                "log_min_p": (np.float32, (count,)),
                "top_k": (np.int64, (count,)),
                "top_p": (np.float64, (count,)),
            }
        )
        host["slots"][:] = slots
        host["seeds"][:] = params.seeds[slots]
        host["temperatures"][:] = params.temperatures[slots]
        host["log_min_p"][:] = params.log_min_p[slots]
        host["top_k"][:] = params.top_k[slots]
        host["top_p"][:] = params.top_p[slots]
        sent = self._staging.send()
        for array, name in (
            (self._seeds, "seeds"),
            (self._temperatures, "temperatures"),
            (self._log_min_p, "log_min_p"),
            (self._top_k, "top_k"),
            (self._top_p, "top_p"),
        ):
            array.index_copy_(0, sent["slots"], sent[name])

    def resolved(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids int64[t] with the tokens that placeholders stand for."""
        slots = (-1 - input_ids).clamp_(min=0)
        return torch.where(input_ids < 0, self._last_tokens[slots], input_ids)

    def draws(self, slots: torch.Tensor, positions: torch.Tensor, *, truncated: bool) -> DeviceDraws:
        """Of rows with slots, positions int64[n]: positions are those that the sampled tokens will have. truncated:
        whether any of them has top-k or top-p."""
        truncation = DeviceTruncation(self._top_k[slots], self._top_p[slots]) if truncated else None
        return DeviceDraws(self._seeds[slots], positions, self._temperatures[slots], self._log_min_p[slots], truncation)

    def record(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Take note of sampled tokens int64[n]. Of a row that failed, the next token is drawn for nobody."""
        self._last_tokens.index_copy_(0, slots, token_ids.clamp(min=0))
