"""Sampling parameters of all running sequences, in arrays indexed by slot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from llmkit.scheduling.plan import AddedRow

SlotArray = np.ndarray[Any, Any]

# What a row needs; a batch is handled by the union of its rows' needs.
RANDOM = 1
TRUNCATED = 2
MIN_P = 4
PENALISED = 8
BIASED = 16
RESTRICTED = 32
BANNED = 64
MIN_TOKENS = 128
LOGPROBS = 256
CONSTRAINED = 512

PROCESSED = PENALISED | BIASED | RESTRICTED | BANNED | MIN_TOKENS | CONSTRAINED
WHOLE_VOCABULARY = -1


class SlotParameters:
    """Arrays of length `max_num_seqs`; what a slot that is not in use holds is arbitrary.

    needs: the flags above. top_k holds vocab_size where it is off, log_min_p -inf. num_logprobs: k, or
    WHOLE_VOCABULARY; valid with the flag LOGPROBS only. seeds: two's complement of the 64-bit seed.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.needs: SlotArray = np.zeros(max_num_seqs, dtype=np.int64)
        self.seeds: SlotArray = np.zeros(max_num_seqs, dtype=np.int64)
        self.temperatures: SlotArray = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k: SlotArray = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p: SlotArray = np.zeros(max_num_seqs, dtype=np.float64)
        self.log_min_p: SlotArray = np.zeros(max_num_seqs, dtype=np.float32)
        self.presence: SlotArray = np.zeros(max_num_seqs, dtype=np.float32)
        self.frequency: SlotArray = np.zeros(max_num_seqs, dtype=np.float32)
        self.repetition: SlotArray = np.zeros(max_num_seqs, dtype=np.float32)
        self.num_prompt_tokens: SlotArray = np.zeros(max_num_seqs, dtype=np.int64)
        self.min_tokens: SlotArray = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_logprobs: SlotArray = np.zeros(max_num_seqs, dtype=np.int64)

    def add(self, row: AddedRow) -> None:
        """Take over the parameters of a sequence that enters the batch."""
        slot, params = row.slot, row.request.sampling_params
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
        self.seeds[slot] = np.uint64(row.seed & 0xFFFF_FFFF_FFFF_FFFF).view(np.int64)
        self.temperatures[slot] = params.temperature
        self.top_k[slot] = top_k
        self.top_p[slot] = params.top_p
        self.log_min_p[slot] = np.log(params.min_p) if params.min_p > 0 else -np.inf
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.repetition[slot] = params.repetition_penalty
        self.num_prompt_tokens[slot] = row.num_prompt_tokens
        self.min_tokens[slot] = params.min_tokens
        self.num_logprobs[slot] = params.logprobs or 0
        self.needs[slot] = self._needs(row, truncated=top_k < self._vocab_size or params.top_p < 1)

    def _needs(self, row: AddedRow, *, truncated: bool) -> int:
        request, params = row.request, row.request.sampling_params
        penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        drawing = RANDOM | (TRUNCATED if truncated else 0) | (MIN_P if params.min_p > 0 else 0)
        return (
            (0 if params.temperature == 0 else drawing)
            | (PENALISED if penalised else 0)
            | (BIASED if params.logit_bias else 0)
            | (RESTRICTED if params.allowed_token_ids is not None else 0)
            | (BANNED if request.bad_words_ids else 0)
            | (MIN_TOKENS if params.min_tokens > 0 and request.stop_token_ids else 0)
            | (LOGPROBS if params.logprobs is not None else 0)
            | (CONSTRAINED if request.grammar is not None else 0)
        )
