from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from llmkit.hookspecs.structured import GrammarRequest
from llmkit.requests.grammar_task import GrammarTask
from llmkit.requests.message import EngineRequest
from llmkit.requests.sampling_params import SamplingParams
from llmkit.sampling.masks import TokenMasks
from llmkit.sampling.sampler import SampledTokens, Sampler
from llmkit.scheduling.plan import AddedRow

MAX_NUM_SEQS = 64
MAX_LEN = 64
CPU = torch.device("cpu")


class Bench:
    """A sampler with its token buffer; sequences are added with keyword arguments of SamplingParams."""

    def __init__(self, vocab_size: int) -> None:
        self.token_ids = np.zeros((MAX_NUM_SEQS, MAX_LEN), dtype=np.int32)
        self.sampler = Sampler(self.token_ids, vocab_size, CPU)
        self.lengths: dict[int, int] = {}

    def add(
        self,
        slot: int,
        *,
        prompt: Sequence[int] = (1,),
        output: Sequence[int] = (),
        seed: int = 0,
        stop_token_ids: Sequence[int] = (),
        bad_words_ids: Sequence[tuple[int, ...]] = (),
        constrained: bool = False,
        **params: Any,
    ) -> None:
        request = EngineRequest(
            request_id=str(slot),
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(**params),
            max_tokens=MAX_LEN,
            stop_token_ids=frozenset(stop_token_ids),
            bad_words_ids=tuple(bad_words_ids),
            grammar=GrammarTask(GrammarRequest("regex", "a"), ("any",)) if constrained else None,
        )
        tokens = [*prompt, *output]
        self.token_ids[slot, : len(tokens)] = tokens
        self.lengths[slot] = len(tokens)
        self.sampler.add(AddedRow(slot, request, 0, seed, tokens, len(prompt), ()))

    def sample(
        self,
        logits: torch.Tensor,
        *slots: int,
        positions: Sequence[int] | None = None,
        masks: TokenMasks | None = None,
    ) -> SampledTokens:
        """One step of `slots` without advancing them; row r of logits (or the only one) is slots[r]'s."""
        where = [self.lengths[slot] for slot in slots] if positions is None else list(positions)
        rows = logits.expand(len(slots), -1).clone()
        return self.sampler.sample(rows, np.array(slots, dtype=np.int32), np.array(where, dtype=np.int32), masks)

    def advance(self, logits: torch.Tensor, *slots: int) -> list[int]:
        """One step of `slots`; the sampled tokens are appended."""
        tokens = self.sample(logits, *slots).token_ids.tolist()
        for slot, token in zip(slots, tokens, strict=True):
            self.token_ids[slot, self.lengths[slot]] = token
            self.lengths[slot] += 1
        return tokens


@pytest.fixture
def bench() -> Callable[[int], Bench]:
    return Bench
