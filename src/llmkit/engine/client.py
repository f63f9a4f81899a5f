"""How the frontend talks to an engine, wherever it runs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from llmkit.engine.utilities import run_utility
from llmkit.requests.message import EngineOutput, EngineRequest

if TYPE_CHECKING:
    from llmkit.engine.factory import Engine
    from llmkit.engine.stats import EngineStats

logger = logging.getLogger("llmkit.engine")


class EngineClient(Protocol):
    """One engine, as its frontend sees it. Called by one thread at a time.

    Requests are known by `EngineRequest.request_id`; unknown ids in aborts are ignored, so that an abort may cross
    the request's own end.
    """

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Hand over requests. Raises EngineClosedError."""
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; no output of theirs is of interest any more."""
        ...

    def abort_sequences(self, sequences: Iterable[tuple[str, int]]) -> None:
        """End single sequences, (request id, index), of requests whose others go on."""
        ...

    def outputs(self) -> list[EngineOutput]:
        """The next outputs. Waits until there are some, or nothing is left to be done (then it is empty)."""
        ...

    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        ...

    def call(self, method: str, *arguments: Any) -> Any:
        """Run a utility (`llmkit.engine.utilities`) between two steps. Raises what it raises."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False if requests that still run prevented it."""
        ...

    def stats(self) -> EngineStats:
        """A snapshot of queues, cache and counters."""
        ...

    def close(self) -> None:
        """Stop the engine and free what it holds. May be called twice."""
        ...


class InlineClient:
    """The engine in this process: `outputs` runs steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._core = engine.core

    def add(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            self._core.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        self._core.abort(request_ids)

    def abort_sequences(self, sequences: Iterable[tuple[str, int]]) -> None:
        for request_id, index in sequences:
            self._core.abort_sequence(request_id, index)

    def outputs(self) -> list[EngineOutput]:
        outputs = self._core.step()
        try:
            self._core.launch()
        except Exception:  # these outputs are to be told; the next step ends with it what is unfinished
            logger.exception("the next step could not be launched")
        return outputs

    def has_work(self) -> bool:
        return self._core.has_work()

    def call(self, method: str, *arguments: Any) -> Any:
        return run_utility(self._engine, method, arguments)

    def reset_prefix_cache(self) -> bool:
        return self._core.reset_prefix_cache()

    def stats(self) -> EngineStats:
        return self._core.stats()

    def close(self) -> None:
        self._engine.close()
