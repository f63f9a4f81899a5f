"""The sequences that run, and their slots."""

from __future__ import annotations

import heapq

from llmkit.requests.request import Request, RequestStatus


class RunningSet:
    """Running requests in the order of admission. Each has a slot below `max_num_seqs`, the lowest that was free.

    A slot that was given up is told to the executor with the next plan, before anything else in it.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        self._requests: dict[Request, None] = {}
        self._free_slots = list(range(max_num_seqs))
        self._removed_slots: list[int] = []

    def __len__(self) -> int:
        return len(self._requests)

    def snapshot(self) -> list[Request]:
        """The running requests, oldest admission first, as a list that later changes do not touch."""
        return list(self._requests)

    def enter(self, request: Request) -> None:
        """Give `request` a slot. Raises IndexError if all are taken."""
        request.slot = heapq.heappop(self._free_slots)
        request.status = RequestStatus.RUNNING
        self._requests[request] = None

    def leave(self, request: Request) -> None:
        """Take the slot of `request` back; its new status is the caller's business."""
        del self._requests[request]
        heapq.heappush(self._free_slots, request.slot)
        self._removed_slots.append(request.slot)
        request.slot = -1

    def remove_all_slots(self) -> None:
        """Nobody runs, and what the executor has been told of it is not known: every slot is told as given up."""
        self._removed_slots = list(range(self.max_num_seqs))

    def take_removed_slots(self) -> list[int]:
        removed, self._removed_slots = self._removed_slots, []
        return removed

    def check_integrity(self) -> None:
        """Every slot must be either free or taken by one request. Raises AssertionError if not."""
        slots = sorted([*self._free_slots, *(request.slot for request in self._requests)])
        assert slots == list(range(self.max_num_seqs)), f"slots {slots}"
