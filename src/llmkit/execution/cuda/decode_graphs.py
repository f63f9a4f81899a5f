"""Decode steps as CUDA graphs: everything from the inputs to the sampled tokens, or to the logits, in one launch.

A graph belongs to a number of rows, a width of the block table and what it ends in. The first step of a kind runs as
usual, which compiles what has to be compiled; then its kernels are captured, and the next step of the kind replays
them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from llmkit.execution.cuda.capture_sizes import padded_rows, padded_width

if TYPE_CHECKING:
    from llmkit.execution.cuda.static_inputs import StaticInputs, StaticStaging
    from llmkit.scheduling.plan import StepPlan

logger = logging.getLogger("llmkit.execution")


class Ending(Enum):
    """What a step's kernels end in: tokens int64[n], drawn from whole rows or from what top-k and top-p leave of some;
    or the logits [n, v], where there is more to do with them."""

    DRAWN = 1
    TRUNCATED = 2
    LOGITS = 3


Body = Callable[[], torch.Tensor]
"""Launches a step's kernels; what its ending says."""


@dataclass
class _Step:
    """run: as usual; keeps alive what the graph reads. output: what the graph writes."""

    inputs: StaticInputs
    run: Body
    graph: torch.cuda.CUDAGraph | None = None
    output: torch.Tensor | None = None


class DecodeGraphs:
    """body: makes the Body that computes inputs up to an ending. On a device without graphs steps run as usual."""

    def __init__(
        self,
        staging: StaticStaging,
        sizes: tuple[int, ...],
        body: Callable[[StaticInputs, Ending], Body],
        device: torch.device,
    ) -> None:
        self._staging, self._sizes, self._body = staging, sizes, body
        self._steps: dict[tuple[int, int, Ending], _Step] = {}
        self._captures = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._captures else None  # type: ignore[no-untyped-call]
        self._pool: Any = None  # of memory, one for all graphs, as no two of them run at once

    def run(self, plan: StepPlan, pages: int, ending: Ending) -> tuple[StaticInputs, torch.Tensor] | None:
        """Launch a decode step whose longest row has so many pages; its padded inputs and what it ends in, unpadded,
        which the next run may overwrite. None if no size fits."""
        rows = padded_rows(plan.num_rows, self._sizes)
        if rows is None:
            return None
        width = padded_width(pages, self._staging.most_pages)
        step = self._steps.get((rows, width, ending))
        if step is None:
            inputs = self._staging.inputs(rows, width)
            step = self._steps[rows, width, ending] = _Step(inputs, self._body(inputs, ending))
        self._staging.fill(plan, rows, width)
        if step.graph is not None:
            assert step.output is not None
            step.graph.replay()
            return step.inputs, step.output[: plan.num_rows]
        output = step.run()
        if self._captures:
            self._capture(step)
        return step.inputs, output[: plan.num_rows]

    def _capture(self, step: _Step) -> None:
        stream, graph = self._stream, torch.cuda.CUDAGraph()
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream())
        try:
            # Not torch.cuda.graph: it collects garbage and empties the allocator's cache, for every size anew.
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    output = step.run()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            logger.warning("decode steps run without graphs: %s", error)
            self._captures = False
            return
        self._pool = self._pool or graph.pool()
        step.graph, step.output = graph, output
