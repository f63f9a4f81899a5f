"""How an asynchronous frontend talks to an engine, wherever that runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from llmkit.errors import InvalidRequestError, described
from llmkit.requests.message import EngineOutput, EngineRequest, refusal_outputs

if TYPE_CHECKING:
    from llmkit.engine.factory import PreparedModel
    from llmkit.execution.setup import LoadProgress


@dataclass(frozen=True)
class EngineHealth:
    """What is known of an engine without asking it.

    alive: it runs, or is being started again. ready: it takes steps now. stuck_s: seconds without a finished step while
    work is pending, else 0. num_restarts: since the beginning. error: why it is not alive, or was not the last time.
    """

    alive: bool
    ready: bool
    stuck_s: float = 0.0
    num_restarts: int = 0
    error: str | None = None


class AsyncEngineClient(Protocol):
    """One engine, as an asynchronous frontend sees it. Used from one event loop at a time.

    Requests are known by `EngineRequest.request_id`, which is unique within the engine; unknown ids in aborts are
    ignored, so that an abort may cross the request's own end.
    """

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Hand over requests, which the same step can begin with; never waits. A refusal by the core comes with the
        outputs: finish reason "error" for each of the request's sequences. Raises EngineClosedError,
        EngineDeadError; then none was handed over."""
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; no output of theirs is of interest any more. Never waits, nor stands behind requests that were
        handed over before."""
        ...

    def abort_sequences(self, sequences: Iterable[tuple[str, int]]) -> None:
        """End single sequences, (request id, index), of requests whose others go on. Never waits."""
        ...

    async def outputs(self) -> list[EngineOutput]:
        """The next outputs; waits until there are some. Raises EngineDeadError, which says the cause, once the engine
        is gone for good and everything it has said was told; EngineClosedError after `close`."""
        ...

    async def call(self, method: str, *arguments: Any) -> Any:
        """Run a utility (`llmkit.engine.utilities`) between two steps. Raises what it raises, EngineClosedError,
        EngineDeadError."""
        ...

    @property
    def health(self) -> EngineHealth:
        """How the engine is; does not wait."""
        ...

    async def close(self) -> None:
        """Stop the engine and free what it holds. May be called twice."""
        ...


def start_async_client(prepared: PreparedModel, progress: LoadProgress | None, *, process: bool) -> AsyncEngineClient:
    """Start the engine of a prepared model and wait until it is ready.

    process: in a process of its own. Raises as `start_engine` does.
    """
    from llmkit.engine.factory import start_engine
    from llmkit.engine.thread_client import ThreadClient

    if process:
        from llmkit.engine.process_client import start_process_client

        return start_process_client(prepared.config, prepared.registry, progress)
    return ThreadClient(partial(start_engine, prepared, progress))


def refusal(request: EngineRequest, error: Exception) -> list[EngineOutput]:
    """The outputs that tell of a request which the core has not taken in: one for each of its sequences."""
    message = str(error) if isinstance(error, InvalidRequestError) else described(error)
    return refusal_outputs(request, message, getattr(error, "param", None))
