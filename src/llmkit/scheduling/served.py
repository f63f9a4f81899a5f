"""What a step has done for each of its requests, for policies that keep accounts."""

from __future__ import annotations

import numpy as np

from llmkit.requests.request import RequestStatus, View
from llmkit.scheduling.plan import StepPlan


class ServedTokens:
    """Made before the result of a step is applied, read after it."""

    __slots__ = ("_lengths", "_plan", "_prompt_tokens")

    def __init__(self, plan: StepPlan) -> None:
        requests, start = plan.requests, plan.num_computed
        finished = RequestStatus.FINISHED
        prompts = np.fromiter((request.num_prompt_tokens for request in requests), np.int32, len(requests))
        alive = np.fromiter((request.status is not finished for request in requests), np.bool_, len(requests))
        computed = np.minimum(start + plan.num_new, prompts) - start
        self._prompt_tokens: list[int] = np.where(alive, computed.clip(0), 0).tolist()
        self._lengths = [len(request.token_ids) for request in requests]
        self._plan = plan

    def rows(self) -> tuple[list[View], list[int], list[int]]:
        """(requests, prompt tokens computed, output tokens), without rows in which both are 0."""
        outputs = [
            len(request.token_ids) - length for request, length in zip(self._plan.requests, self._lengths, strict=True)
        ]
        views = [request.view for request in self._plan.requests]
        if all(outputs):
            return views, self._prompt_tokens, outputs
        kept = [
            (view, prompt, output)
            for view, prompt, output in zip(views, self._prompt_tokens, outputs, strict=True)
            if prompt or output
        ]
        return [row[0] for row in kept], [row[1] for row in kept], [row[2] for row in kept]
