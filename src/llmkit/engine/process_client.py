"""Clients of an engine in a process of its own: for an event loop, and for callers that wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from llmkit.engine.async_client import EngineHealth
from llmkit.engine.process import messages
from llmkit.engine.process.boot import main_path, refuse_engine_in_import
from llmkit.engine.process.engine_process import Launch
from llmkit.engine.process.supervisor import Supervisor
from llmkit.errors import EngineClosedError, PluginError
from llmkit.requests.message import EngineOutput, EngineRequest

if TYPE_CHECKING:
    from llmkit.config import EngineConfig
    from llmkit.engine.process.messages import EngineSummary
    from llmkit.engine.process.served_engine import EngineInfo
    from llmkit.engine.stats import EngineStats
    from llmkit.execution.setup import LoadProgress
    from llmkit.registry import Registry


class ProcessClient:
    """`llmkit.engine.async_client.AsyncEngineClient` over a supervised process. Used from one event loop, that in which
    `outputs` is awaited first; `start` may be called in any thread."""

    def __init__(self, launch: Launch, config: EngineConfig) -> None:
        self._supervisor = Supervisor(launch, config.process, self._deliver, self._died)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived = asyncio.Event()
        self._outputs: list[EngineOutput] = []
        self._error: Exception | None = None

    def start(self, progress: LoadProgress | None = None) -> EngineInfo:
        """Start the process and wait until it serves; `progress` is called in this thread. Raises the error that has
        kept the engine from starting."""
        info: EngineInfo = self._supervisor.start(progress)
        return info

    @property
    def info(self) -> EngineInfo:
        """What the engine is made of."""
        info: EngineInfo = self._supervisor.info
        return info

    @property
    def pid(self) -> int | None:
        """Of the engine process; None while there is none."""
        return self._supervisor.pid()

    @property
    def summary(self) -> EngineSummary | None:
        """The engine after its last step; None before the first."""
        return self._supervisor.summary

    def add(self, requests: Sequence[EngineRequest]) -> None:
        self._supervisor.add(requests)

    def abort(self, request_ids: Iterable[str]) -> None:
        self._supervisor.abort(request_ids)

    def abort_sequences(self, sequences: Iterable[tuple[str, int]]) -> None:
        self._supervisor.abort_sequences(sequences)

    async def outputs(self) -> list[EngineOutput]:
        """The next outputs; all that have come since the last call. Raises EngineDeadError, EngineClosedError."""
        while True:
            self._arrived.clear()
            with self._lock:
                self._loop = asyncio.get_running_loop()
                outputs, self._outputs, error = self._outputs, [], self._error
            if outputs:
                return outputs
            if error is not None:
                raise error
            await self._arrived.wait()

    async def call(self, method: str, *arguments: Any) -> Any:
        return await asyncio.wrap_future(self._supervisor.call(method, arguments))

    @property
    def health(self) -> EngineHealth:
        supervisor = self._supervisor
        return EngineHealth(
            alive=supervisor.state not in ("dead", "closed"),
            ready=supervisor.state == "running",
            stuck_s=supervisor.stuck_s,
            num_restarts=supervisor.num_restarts,
            error=None if supervisor.error is None else str(supervisor.error),
        )

    async def close(self) -> None:
        await asyncio.to_thread(self._supervisor.close)
        self._died(EngineClosedError("the engine has been closed."))

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        with self._lock:
            self._outputs += outputs
        self._tell()

    def _died(self, error: Exception) -> None:
        with self._lock:
            self._error = self._error or error
        self._tell()

    def _tell(self) -> None:
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(self._arrived.set)


class SupervisedClient:
    """`llmkit.engine.client.EngineClient` over a supervised process."""

    def __init__(self, launch: Launch, config: EngineConfig) -> None:
        self._news: SimpleQueue[list[EngineOutput] | Exception] = SimpleQueue()
        self._supervisor = Supervisor(launch, config.process, self._news.put, self._news.put)
        self._error: Exception | None = None
        self._unfinished: dict[str, int] = {}

    def start(self, progress: LoadProgress | None = None) -> EngineInfo:
        """As `ProcessClient.start`."""
        info: EngineInfo = self._supervisor.start(progress)
        return info

    @property
    def pid(self) -> int | None:
        """Of the engine process; None while there is none."""
        return self._supervisor.pid()

    @property
    def num_restarts(self) -> int:
        """How often the process was started again."""
        return self._supervisor.num_restarts

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Hand over requests. What the scheduler would refuse is refused here, as it is inline; a connector's refusal
        comes as outputs."""
        for request in requests:
            self._supervisor.info.limits.check(request)
        self._supervisor.add(requests)
        self._unfinished |= {request.request_id: request.sampling_params.n for request in requests}

    def abort(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)
        for request_id in ids:
            self._unfinished.pop(request_id, None)
        self._supervisor.abort(ids)

    def abort_sequences(self, sequences: Iterable[tuple[str, int]]) -> None:
        pairs = list(sequences)
        for request_id, _ in pairs:
            self._ended(request_id)
        self._supervisor.abort_sequences(pairs)

    def outputs(self) -> list[EngineOutput]:
        """Waits for the next; empty if nothing is under way. Raises EngineDeadError."""
        if self._error is not None:
            raise self._error
        if not self._unfinished:
            return []
        news = self._news.get()
        if isinstance(news, Exception):
            self._error = news
            raise news
        for output in news:
            if output.finish_reason is not None:
                self._ended(output.request_id)
        return news

    def has_work(self) -> bool:
        return bool(self._unfinished)

    def call(self, method: str, *arguments: Any) -> Any:
        """Run a utility in the engine process, and wait for its answer."""
        return self._supervisor.call(method, arguments).result()

    def reset_prefix_cache(self) -> bool:
        return bool(self.call("reset_prefix_cache"))

    def stats(self) -> EngineStats:
        stats: EngineStats = self.call("stats")
        return stats

    def close(self) -> None:
        self._supervisor.close()

    def _ended(self, request_id: str) -> None:
        left = self._unfinished.get(request_id, 0) - 1
        if left > 0:
            self._unfinished[request_id] = left
        else:
            self._unfinished.pop(request_id, None)


def launch_of(config: EngineConfig, registry: Registry) -> Launch:
    """What an engine process for a prepared configuration is started with.

    Plugins that were registered from Python are found again by the name of their module; the program itself is imported
    anew only if one of them is defined in it. Raises PluginError where that cannot work.
    """
    from llmkit.engine.process.served_engine import EngineBuilder

    refuse_engine_in_import()
    in_main = any(entry.value.startswith("__main__") for entry in registry.manifest().entries)
    path = main_path() if in_main else None
    if in_main and path is None:
        raise PluginError(
            "A plugin is registered from Python that is defined in the main module, which is no file that the engine "
            "process could import.",
            hint="Define it in a module.",
        )
    observability = config.observability
    payload = messages.dumped(EngineBuilder(config, registry))
    return Launch(payload, observability.log_level, path, observability.log_format)


def start_process_client(
    config: EngineConfig, registry: Registry, progress: LoadProgress | None = None
) -> ProcessClient:
    """Start an engine process for a prepared configuration (see `prepare_model`) and wait until it serves.

    Raises what `build_engine` raises in the process, as if it had been raised here, and EngineError if the process dies
    before it can say why. Nothing is left of it then.
    """
    client = ProcessClient(launch_of(config, registry), config)
    client.start(progress)
    return client


def start_supervised_client(
    config: EngineConfig, registry: Registry, progress: LoadProgress | None = None
) -> SupervisedClient:
    """`start_process_client` for callers without an event loop."""
    client = SupervisedClient(launch_of(config, registry), config)
    client.start(progress)
    return client
