"""Decode steps as CUDA graphs: everything from the inputs to the sampled tokens, or to the logits, in one launch.

A graph belongs to a number of rows, a width of the block table, the KV groups in which rows share prefixes, and what it
ends in. Those for common numbers of rows that share nothing are captured at the start, before the first request
(`warm_up`), or when such a step is needed first; a step of another number runs in the next larger one, until it has
come so often that a graph of its own pays. Before a capture the step runs once as usual, which compiles what has to
be compiled.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from llmkit.execution.cuda.capture_sizes import padded_rows, padded_width
from llmkit.jit.rehearsal import Rehearsal
from llmkit.metrics.step_parts import part

if TYPE_CHECKING:
    from llmkit.execution.cuda.static_inputs import StaticInputs, StaticStaging
    from llmkit.scheduling.plan import IntArray, StepPlan

logger = logging.getLogger("llmkit.execution")

WORTH_A_GRAPH = 500  # steps: padding costs a few percent of one, a capture as much as thirty


class Ending(Enum):
    """What a step's kernels end in: tokens int64[n], drawn from whole rows or from what top-k and top-p leave of some;
    or the logits [n, v], where there is more to do with them."""

    DRAWN = 1
    TRUNCATED = 2
    LOGITS = 3


@dataclass(frozen=True)
class Body:
    """launch: the step's kernels; returns what its ending says. follow: tells whoever has planned them how long rows
    are, ahead of each run."""

    launch: Callable[[], torch.Tensor]
    follow: Callable[[IntArray], None]


@dataclass
class _Step:
    """body: keeps alive what the graph reads. output: what the graph writes."""

    inputs: StaticInputs
    body: Body
    graph: torch.cuda.CUDAGraph | None = None
    output: torch.Tensor | None = None


_Key = tuple[int, int, tuple[int, ...], Ending]
"""Rows, columns of the block table, KV groups in which rows share prefixes, ending."""


class DecodeGraphs:
    """sizes: numbers of rows, of which `common` are captured first. body: makes the Body that computes inputs up to an
    ending. On a device without graphs steps run as usual."""

    def __init__(
        self,
        staging: StaticStaging,
        sizes: tuple[int, ...],
        common: tuple[int, ...],
        body: Callable[[StaticInputs, Ending], Body],
        device: torch.device,
    ) -> None:
        self._staging, self._sizes, self._common, self._body = staging, sizes, common, body
        self._steps: dict[_Key, _Step] = {}
        self._asked: Counter[_Key] = Counter()
        self._device = device
        self._captures = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._captures else None  # type: ignore[no-untyped-call]
        self._pool: Any = None  # of memory, one for all graphs, as no two of them run at once

    def run(self, plan: StepPlan, pages: int, ending: Ending) -> tuple[StaticInputs, torch.Tensor] | None:
        """Launch a decode step whose longest row has so many pages; its padded inputs and what it ends in, unpadded,
        which the next run may overwrite. None if no size fits."""
        with part("inputs"):
            prefixes = self._staging.find_prefixes(plan)
        key = self._key(plan.num_rows, padded_width(pages, self._staging.most_pages), tuple(prefixes), ending)
        if key is None:
            return None
        step = self._steps.get(key) or self._new(key)
        with part("inputs"):
            step.body.follow(self._staging.fill(plan, *key[:2], prefixes))
        if step.graph is not None:
            assert step.output is not None
            with part("graph launch"):
                step.graph.replay()
            return step.inputs, step.output[: plan.num_rows]
        output = step.body.launch()
        if self._captures:
            self._capture(step)
        return step.inputs, output[: plan.num_rows]

    @property
    def num_captured(self) -> int:
        return sum(step.graph is not None for step in self._steps.values())

    def rehearse(self, rehearsal: Rehearsal) -> None:
        """In this rehearsal: have all compiled that `warm_up` launches, small steps first, which have most kernels of
        their own. Nothing is kept."""
        keys, shared_keys = self._first_keys()
        for key in (*reversed(keys), *shared_keys):
            self._run_padding(self._step(key), key)
            if not rehearsal.num_kernels:  # libraries' alone
                return

    def warm_up(self) -> None:
        """Capture the steps of common sizes that end in tokens drawn from whole rows, over the narrowest table. The
        rows are padding: nothing is written to the cache."""
        if not self._captures:
            return
        keys, shared_keys = self._first_keys()
        with Rehearsal(self._device):
            for key in keys:  # the largest first: what it leaves of memory is enough for the others
                self._run_padding(self._new(key), key)
            for key in shared_keys:
                self._run_padding(self._step(key), key)
        # Loading kernels waits for the device: not when rows that share something come to be captured.
        for key in dict.fromkeys((*shared_keys[:1], *shared_keys[-1:])):
            self._run_padding(self._step(key), key)
        for key in keys:
            step = self._steps[key]
            self._run_padding(step, key)
            if not self._capture(step):
                return

    def _first_keys(self) -> tuple[list[_Key], list[_Key]]:
        """Of what `warm_up` runs, largest first: steps that share nothing, and those that share what they may."""
        width, sharing = padded_width(1, self._staging.most_pages), self._staging.sharing_groups
        sizes = list(reversed(self._common))
        alone: list[_Key] = [(rows, width, (), Ending.DRAWN) for rows in sizes]
        return alone, [(rows, width, sharing, Ending.DRAWN) for rows in sizes if sharing]

    def _run_padding(self, step: _Step, key: _Key) -> None:
        lengths = self._staging.fill(None, *key[:2], dict.fromkeys(key[2]))  # what is looked up must be there
        step.body.follow(lengths)
        step.body.launch()

    def _key(self, num_rows: int, width: int, sharing: tuple[int, ...], ending: Ending) -> _Key | None:
        rows, common = padded_rows(num_rows, self._sizes), padded_rows(num_rows, self._common)
        if rows is None or common is None:
            return None
        own = rows, width, sharing, ending
        if own in self._steps or not self._captures:
            return own
        self._asked[own] += 1
        return own if self._asked[own] > WORTH_A_GRAPH else (common, width, sharing, ending)

    def _new(self, key: _Key) -> _Step:
        step = self._steps[key] = self._step(key)
        return step

    def _step(self, key: _Key) -> _Step:
        inputs = self._staging.inputs(*key[:3])
        return _Step(inputs, self._body(inputs, key[3]))

    def _capture(self, step: _Step) -> bool:
        """Whether the step has a graph now; without, steps run as usual from here on."""
        stream, graph = self._stream, torch.cuda.CUDAGraph()
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream())
        try:
            # Not torch.cuda.graph: it collects garbage and empties the allocator's cache, for every size anew.
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    output = step.body.launch()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            logger.warning("decode steps run without graphs: %s", error)
            self._captures = False
            return False
        self._pool = self._pool or graph.pool()
        step.graph, step.output = graph, output
        return True
