"""What the page shows of the engine, gathered at most a few times a second however many look on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import llmkit
from llmkit.errors import EngineError
from llmkit.metrics.engine import EngineHistory

if TYPE_CHECKING:
    from llmkit.engine.stats import StepSummary
    from llmkit.kv_cache.stats import KVMap
    from llmkit.registry import Selection

PATIENCE_S = 1.0
"""Seconds that the engine's answer is waited for; then what it said last is shown."""

MAX_AGE_S = 0.25
"""An answer so young is not asked for again."""

MAX_CELLS = 1200
"""Cells of the map of blocks; with more blocks than that, one cell stands for several."""

NUM_STEPS = 120


class LiveView:
    """server: the server's context."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._history = EngineHistory()
        self._steps: Sequence[StepSummary] = ()
        self._blocks: KVMap | None = None
        self._selections: Sequence[Selection] = ()
        self._engine_id = ""
        self._asked_at = 0.0
        self._asking: asyncio.Task[None] | None = None

    async def state(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        await self._refresh()
        server, health, latest = self._server, self._server.llm.health, self._history.latest
        counters, totals = self._history.totals.counters, server.llm.totals
        stats = None if latest is None else latest.stats
        return {
            "version": llmkit.__version__,
            "model": server.models.names[0],
            "max_model_len": server.models.max_model_len,
            "stuck_after_s": server.settings.stuck_after_s,
            "health": {
                "alive": health.alive,
                "ready": health.ready,
                "stuck_s": health.stuck_s,
                "restarts": health.num_restarts,
                "error": health.error,
            },
            "running": 0 if stats is None else stats.num_running,
            "waiting": 0 if stats is None else stats.num_waiting + stats.num_compiling + stats.num_loading,
            "kv_usage": 0 if stats is None else stats.kv_usage,
            "sleep_level": None if stats is None else stats.sleep_level,
            "preemptions": counters["num_preemptions"],
            "steps_total": counters["num_steps"],
            "prefix_queries": counters["prefix_query_tokens"],
            "prefix_hits": counters["prefix_hit_tokens"],
            "prompt_tokens": totals.prompt_tokens,
            "generation_tokens": totals.generation_tokens,
            "requests": dict(totals.finished),
            "steps": [[step.step, step.num_tokens, step.token_budget] for step in self._steps[-NUM_STEPS:]],
            "blocks": None if self._blocks is None else cells(self._blocks),
            "plugins": [_shown(selection) for selection in self._selections],
        }

    async def _refresh(self) -> None:
        loop = asyncio.get_running_loop()
        pending = self._asking is not None and not self._asking.done() and self._asking.get_loop() is loop
        if not pending:
            if time.monotonic() - self._asked_at < MAX_AGE_S:
                return
            self._asking = loop.create_task(self._ask(), name="llmkit-live-view")
        assert self._asking is not None
        await asyncio.wait([self._asking], timeout=PATIENCE_S)

    async def _ask(self) -> None:
        llm = self._server.llm
        try:
            snapshot = await llm.snapshot()
            self._steps, self._blocks = await llm.recent_steps(), await llm.kv_map()
            if snapshot.engine_id != self._engine_id:
                self._selections, self._engine_id = await llm.selections(), snapshot.engine_id
            self._history.note(snapshot)
        except EngineError:
            pass  # its health says why
        self._asked_at = time.monotonic()


def cells(blocks: KVMap) -> dict[str, Any]:
    """The map in at most MAX_CELLS cells. states: a digit for each cell, of the state that most of its blocks have: 0
    free, 1 cached, 2 in use, 3 shared. per_cell: blocks of a cell."""
    states = blocks.states
    per_cell = -(-len(states) // MAX_CELLS) or 1
    if per_cell == 1:
        digits = "".join(map(str, states))
    else:
        groups = (states[start : start + per_cell] for start in range(0, len(states), per_cell))
        digits = "".join(str(max(range(4), key=group.count)) for group in groups)
    return {"states": digits, "per_cell": per_cell, "block_size": blocks.block_size, "counts": blocks.counts()}


def _shown(selection: Selection) -> dict[str, Any]:
    return {
        "kind": selection.kind,
        "name": selection.name,
        "distribution": selection.distribution,
        "reason": selection.reason,
        "rejected": dict(selection.rejected),
    }
