"""The engine's numbers, asked for without ever waiting long: a busy or hung engine answers with what it said last."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from llmkit.errors import EngineError
from llmkit.metrics.engine import EngineHistory

if TYPE_CHECKING:
    from llmkit import AsyncLLM

logger = logging.getLogger("llmkit.server")


PATIENCE_S = 1.0
"""Seconds that an answer of the engine is waited for."""


class EngineWatch:
    """`history` holds what the engine has told. One question is under way at a time, whoever asks."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.history = EngineHistory()
        self._llm = llm
        self._asking: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Ask the engine, and wait a moment for its answer; a later one is taken in when it comes."""
        loop = asyncio.get_running_loop()
        if self._asking is None or self._asking.done() or self._asking.get_loop() is not loop:
            self._asking = loop.create_task(self._ask(), name="llmkit-engine-watch")
        await asyncio.wait([self._asking], timeout=PATIENCE_S)

    async def _ask(self) -> None:
        try:
            self.history.note(await self._llm.snapshot())
        except EngineError as error:
            logger.debug("the engine tells no numbers: %s", error)
