"""A step whose kernels were launched: its tokens are on their way to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from llmkit.sampling.sampler import FAILURES
from llmkit.scheduling.plan import StepResult

if TYPE_CHECKING:
    from llmkit.sampling.logprobs import DeviceLogprobs
    from llmkit.scheduling.plan import IntArray

LongArray = np.ndarray[tuple[int], np.dtype[np.int64]]


class HostTokens:
    """Tokens [n] that are being copied to pinned memory; the copy is the step's last work on the device."""

    def __init__(self, memory: torch.Tensor, token_ids: torch.Tensor) -> None:
        self._host = memory[: len(token_ids)]
        self._host.copy_(token_ids, non_blocking=True)
        self._arrived: torch.cuda.Event | None = None
        if token_ids.is_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> LongArray:
        """int64[n]; raises what went wrong on the device up to here."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.numpy().copy()


class HostMemory:
    """Pinned memory for the tokens of as many steps as are under way."""

    def __init__(self, max_num_seqs: int, *, pinned: bool) -> None:
        self._size, self._pinned = max_num_seqs, pinned
        self._free: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        if self._free:
            return self._free.pop()
        return torch.empty(self._size, dtype=torch.int64, pin_memory=self._pinned)

    def give_back(self, memory: torch.Tensor) -> None:
        self._free.append(memory)


@dataclass(frozen=True)
class PendingLogprobs:
    """Log-probabilities of some of the sampled rows, on their way to the host like the tokens, and before them."""

    rows: IntArray
    of_rows: DeviceLogprobs

    @classmethod
    def sent(cls, rows: IntArray, logprobs: DeviceLogprobs) -> PendingLogprobs:
        """rows [k]: which of the sampled rows they are of."""
        return cls(rows, logprobs.on_host(_sent))


def _sent(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


@dataclass(eq=False)
class PendingStep:
    """The handle of a step of `num_rows` rows, of which `rows` [n] sample. settled: told of the tokens [n], once unless
    an interrupt struck meanwhile."""

    num_rows: int
    rows: IntArray
    tokens: HostTokens
    settled: Callable[[PendingStep, LongArray], None]
    logprobs: PendingLogprobs | None = None
    _result: StepResult | None = field(default=None, init=False)

    def result(self) -> StepResult:
        """Wait for the tokens. May be called again."""
        if self._result is None:
            codes = self.tokens.wait()
            result = StepResult(token_ids=np.full(self.num_rows, -1, dtype=np.int32))
            result.token_ids[self.rows] = codes
            for i in np.flatnonzero(codes < 0).tolist():
                result.failed[int(self.rows[i])] = FAILURES[int(codes[i])]
            self._add_logprobs(result, codes)
            self.settled(self, codes)
            self._result = result
        return self._result

    def _add_logprobs(self, result: StepResult, codes: LongArray) -> None:
        if self.logprobs is None:
            return
        places = self.logprobs.rows
        entries = self.logprobs.of_rows.entries(codes[places].tolist())
        for place, entry in zip(places.tolist(), entries, strict=True):
            if codes[place] >= 0:
                result.logprobs[int(self.rows[place])] = entry
