"""The policy. A request that has been overtaken `max_overtakes` times goes next, so that none starves."""

from __future__ import annotations

import heapq

from llmkit.hookspecs.scheduler import RequestView, SchedulerPolicy


class ShortestFirst(SchedulerPolicy):
    def __init__(self, max_overtakes: int) -> None:
        self._max_overtakes = max_overtakes
        self._heap: list[tuple[int, int, RequestView]] = []
        self._arrivals: dict[RequestView, int] = {}  # oldest first; value: how often it was overtaken

    def add(self, request: RequestView) -> None:
        heapq.heappush(self._heap, (request.num_prompt_tokens, request.sequence_number, request))
        self._arrivals[request] = 0

    def peek(self) -> RequestView | None:
        while self._heap and self._heap[0][2] not in self._arrivals:
            heapq.heappop(self._heap)  # removed earlier
        if not self._arrivals:
            return None
        oldest, overtaken = next(iter(self._arrivals.items()))
        return oldest if overtaken >= self._max_overtakes else self._heap[0][2]

    def pop(self) -> RequestView:
        request = self.peek()
        if request is None:
            raise IndexError("no request waits")
        oldest = next(iter(self._arrivals))
        if request is not oldest:
            self._arrivals[oldest] += 1
        del self._arrivals[request]
        return request

    def remove(self, request: RequestView) -> None:
        self._arrivals.pop(request, None)

    def __len__(self) -> int:
        return len(self._arrivals)
