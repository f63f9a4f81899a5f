"""A waiting queue in the order of a key that does not change while a request waits."""

from __future__ import annotations

import heapq
from abc import abstractmethod

from llmkit.hookspecs.scheduler import RequestView, SchedulerPolicy


class OrderedPolicy(SchedulerPolicy):
    """Smallest key first, in a heap. Removed requests stay in it until they come up, or outnumber the rest."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RequestView]] = []
        self._waiting: set[RequestView] = set()

    @abstractmethod
    def key(self, request: RequestView) -> float:
        """Position in the queue; ties are broken by arrival."""

    def add(self, request: RequestView) -> None:
        if request in self._waiting:
            return
        # An entry from before a removal would bring the request up twice.
        if len(self._heap) > 2 * len(self._waiting) + 16:
            self._heap = [entry for entry in self._heap if entry[2] in self._waiting]
            heapq.heapify(self._heap)
        self._waiting.add(request)
        heapq.heappush(self._heap, (self.key(request), request.sequence_number, request))

    def peek(self) -> RequestView | None:
        heap = self._heap
        while heap and heap[0][2] not in self._waiting:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def pop(self) -> RequestView:
        request = self.peek()
        if request is None:
            raise IndexError("no request waits")
        heapq.heappop(self._heap)
        self._waiting.discard(request)
        return request

    def remove(self, request: RequestView) -> None:
        self._waiting.discard(request)

    def __len__(self) -> int:
        return len(self._waiting)
