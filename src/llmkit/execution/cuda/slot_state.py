"""What the device knows of every slot: its last token, and what its draws depend on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from llmkit.execution.staging import StagingBuffer
from llmkit.sampling.device_draw import DeviceTruncation, DrawParameters, LastTokens

if TYPE_CHECKING:
    from llmkit.hookspecs.kernels import KernelTable
    from llmkit.sampling.parameters import SlotParameters
    from llmkit.scheduling.plan import IntArray


class SlotState:
    """Arrays by slot on the device; slot `scratch`, behind the last, belongs to nobody: padding goes there.

    A token id below 0 in a step's inputs is a placeholder, -1 - slot: it stands for the token that was sampled last
    for the slot, which the host may not know yet.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device, kernels: KernelTable) -> None:
        self.scratch = max_num_seqs
        self._kernels = kernels
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

    def enter(
        self, input_ids: torch.Tensor, slots: torch.Tensor, *, truncated: bool
    ) -> tuple[torch.Tensor, DrawParameters]:
        """What a step begins with: input_ids int64[t] with the tokens that placeholders stand for, and what the draws
        of rows with slots int64[n] depend on. truncated: whether any of them has top-k or top-p."""
        parameters = self._parameters(truncated)
        entered = self._kernels.enter_step(input_ids, self._last_tokens, slots, parameters)
        if entered is not None:
            return entered
        known = self._last_tokens[(-1 - input_ids).clamp_(min=0)]
        return torch.where(input_ids < 0, known, input_ids), parameters.of(slots)

    def parameters(self, slots: torch.Tensor, *, truncated: bool) -> DrawParameters:
        """As `enter`, without a step's tokens."""
        return self._parameters(truncated).of(slots)

    def last_tokens(self, slots: torch.Tensor) -> LastTokens:
        """Where the tokens of rows with slots int64[n] are noted down for the next step."""
        return LastTokens(slots, self._last_tokens)

    def _parameters(self, truncated: bool) -> DrawParameters:
        truncation = DeviceTruncation(self._top_k, self._top_p) if truncated else None
        return DrawParameters(self._seeds, self._temperatures, self._log_min_p, truncation)
