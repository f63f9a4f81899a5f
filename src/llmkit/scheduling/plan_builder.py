"""A step plan while it is being made."""

from __future__ import annotations

import numpy as np

from llmkit.kv_cache.manager import TableUpdate
from llmkit.requests.request import Request
from llmkit.scheduling.plan import AddedRow, BlockUpdate, IntArray, StepPlan, StepTransfers


class PlanBuilder:
    """Rows chosen so far, and the tokens that are left. Nothing of a request changes before `build`."""

    __slots__ = ("added", "block_copies", "block_updates", "budget", "num_new", "requests")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.requests: list[Request] = []
        self.num_new: list[int] = []
        self.added: list[AddedRow] = []
        self.block_updates: list[BlockUpdate] = []
        self.block_copies: list[tuple[int, int]] = []

    def add(self, request: Request, num_new: int) -> None:
        """A row that computes `num_new` tokens; the caller has checked budget and blocks."""
        self.requests.append(request)
        self.num_new.append(num_new)
        self.budget -= num_new

    def grow(self, request: Request, updates: list[TableUpdate]) -> None:
        """Blocks were appended to the tables of a running request."""
        slot = request.slot
        self.block_updates += [BlockUpdate(slot, group, start, blocks) for group, start, blocks in updates]

    def enter(
        self,
        request: Request,
        num_new: int,
        block_ids: tuple[list[int], ...],
        block_copies: list[tuple[int, int]],
    ) -> None:
        """A row of a request that has just got its slot."""
        self.added.append(
            AddedRow(
                slot=request.slot,
                request=request.request,
                index=request.index,
                seed=request.seed,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                block_ids=block_ids,
            )
        )
        self.block_copies += block_copies
        self.add(request, num_new)

    def withdraw(self, request: Request) -> None:
        """Undo what was planned for a running request that is about to be preempted."""
        self.block_updates = [update for update in self.block_updates if update.slot != request.slot]
        if request in self.requests:
            row = self.requests.index(request)
            del self.requests[row]
            self.budget += self.num_new.pop(row)

    def build(
        self,
        step: int,
        removed_slots: list[int],
        transfers: StepTransfers | None = None,
        swaps: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], []),
    ) -> StepPlan:
        """The plan, with the requests moved on as if it had been executed: from here on its tokens count as
        computed, and the token that a row will sample counts as expected (its placeholder). swaps: out, in."""
        slots: list[int] = []
        starts: list[int] = []
        samples: list[bool] = []
        constrained: list[int] = []
        for request, num_new in zip(self.requests, self.num_new, strict=True):
            start = request.num_computed_tokens
            end = start + num_new
            slots.append(request.slot)
            starts.append(start)
            request.num_computed_tokens = end
            request.last_step = step
            if end == request.num_expected_tokens and request.sampling:
                request.num_expected_tokens = end + 1
                if request.grammar is not None:
                    constrained.append(len(samples))
                samples.append(True)
            else:
                samples.append(False)
        return StepPlan(
            step=step,
            slots=np.array(slots, np.int32),
            num_computed=np.array(starts, np.int32),
            num_new=np.array(self.num_new, np.int32),
            samples=np.array(samples, np.bool_),
            added=self.added,
            block_updates=self.block_updates,
            block_copies=self.block_copies,
            swaps_out=swaps[0],
            swaps_in=swaps[1],
            removed_slots=removed_slots,
            requests=self.requests,
            transfers=transfers,
            grammar_rows=np.array(constrained, np.int32) if constrained else None,
            grammar_masks=self._masks(constrained) if constrained else None,
        )

    def _masks(self, rows: list[int]) -> IntArray:
        grammars = [self.requests[row].grammar for row in rows]
        return np.stack([grammar.row for grammar in grammars if grammar is not None])
