"""The step plan: what the scheduler tells the executor, and what comes back.

A running sequence owns a *slot*, a row number below `max_num_seqs`, from its admission to its end or preemption.
Slots are the identity that scheduler and model runner share: the runner keeps all per-sequence state in arrays
indexed by slot, so a step in which nothing but the tokens changed is described by a few arrays and handled
without per-sequence Python work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from llmkit.hookspecs.connector import TransferReport
    from llmkit.requests.logprobs import PositionLogprobs
    from llmkit.requests.message import EngineRequest
    from llmkit.requests.request import Request

IntArray = np.ndarray[Any, np.dtype[np.int32]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class AddedRow:
    """A sequence that enters the batch (for the first time, after preemption, or as a fork).

    token_ids: prompt and output tokens so far. block_ids: allocation blocks per KV group, those that hold
    already computed tokens included. seed: 64-bit seed of this sequence.
    """

    slot: int
    request: EngineRequest
    index: int
    seed: int
    token_ids: list[int]
    num_prompt_tokens: int
    block_ids: tuple[list[int], ...]


@dataclass(frozen=True, slots=True)
class BlockUpdate:
    """Blocks appended to the table of `slot` in KV group `group`, from column `start` on."""

    slot: int
    group: int
    start: int
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class InDoubt:
    """Transfers of steps that were broken off: of what it has never been told of, or has told the end of already, a
    worker tells the end now, as failed. loads: ids of asynchronous ones, and their blocks. holds: ids."""

    loads: Mapping[int, frozenset[int]]
    holds: frozenset[int]


@dataclass(frozen=True, slots=True)
class StepTransfers:
    """What a connector's worker halves are told in a step.

    payload: the connector's own; None: nothing is moved, and loads that belong to this step fail. sync_blocks: blocks
    that must be loaded before this step attends to them. loads: asynchronous loads that begin, by id, and their blocks.
    holds: ids of those that begin. cancelled: ids of loads that nobody waits for any more. wait_s: seconds to wait for
    a transfer, in a step that computes nothing. in_doubt: what steps before this one may or may not have told.
    """

    payload: Any = None
    sync_blocks: frozenset[int] = frozenset()
    loads: Mapping[int, frozenset[int]] = field(default_factory=dict)
    holds: tuple[int, ...] = ()
    cancelled: tuple[int, ...] = ()
    wait_s: float = 0.0
    in_doubt: InDoubt | None = None


@dataclass(slots=True)
class StepPlan:
    """One step. Row r of the arrays is one sequence; n rows.

    Order in which the runner applies it: removed slots, added rows, block updates, swaps out, swaps in, block copies,
    forward.

    slots int32[n]. num_computed int32[n]: tokens of the row that are in the cache already, that is the position of the
    first new token. num_new int32[n]: tokens to compute, >= 1. samples bool[n]: whether the row's last token is
    followed by a sampled one. A sampled token is written by the runner at position num_computed + num_new of
    its slot, so the next plan can refer to it before the host has seen it (a placeholder).
    block_copies: (source, destination) allocation blocks, copied before the forward (copy-on-write).
    swaps_out, swaps_in: (device block, host block) to be copied to the host and back; a swap in may read what a swap
    out of the same step has written.
    grammar_rows int32[k]: rows that sample under a grammar; grammar_masks int32[k, words]: for each, the tokens that
    may come next, bit i of word w: token 32w+i. None if there are no such rows.
    removed_slots: given up since the last plan; after a step that was broken off all of them, also empty ones.
    requests: the scheduler's own records of the rows, same order; never leaves the process.
    transfers: for the connector; a step may have these and no rows.
    """

    step: int
    slots: IntArray
    num_computed: IntArray
    num_new: IntArray
    samples: BoolArray
    added: list[AddedRow] = field(default_factory=list)
    block_updates: list[BlockUpdate] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    swaps_out: list[tuple[int, int]] = field(default_factory=list)
    swaps_in: list[tuple[int, int]] = field(default_factory=list)
    removed_slots: list[int] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list, repr=False)
    transfers: StepTransfers | None = None
    grammar_rows: IntArray | None = None
    grammar_masks: IntArray | None = None

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return int(self.num_new.sum())


@dataclass(slots=True)
class StepResult:
    """What a step produced.

    token_ids int32[n]: the sampled token of each plan row, -1 where the row did not sample.
    logprobs: plan row → entry of its sampled token, for rows that asked.
    prompt_logprobs: plan row → entries of the prompt positions that this step made known, in order.
    embeddings: plan row → embedding of its prompt, float [hidden_size], for rows that asked and are done with it.
    failed: plan row → message, for rows whose result is unusable (e.g. NaN logits); only these fail.
    transfers: what the connector's worker halves have finished, merged; None without a connector. transfer_faults:
    what was wrong with them, in words.
    """

    token_ids: IntArray
    logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[PositionLogprobs]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    embeddings: dict[int, list[float]] = field(default_factory=dict)
    transfers: TransferReport | None = None
    transfer_faults: list[str] = field(default_factory=list)
