"""Runs the server until it is told to stop: sockets, TLS, signals, the end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from llmkit import AsyncLLM
from llmkit.config import EngineConfig, ServerConfig
from llmkit.errors import ConfigError
from llmkit.registry import Registry, detect_environment
from llmkit_server.app import create_app
from llmkit_server.connection import connection_type
from llmkit_server.context import ServerContext
from llmkit_server.listening import address_of, bound_socket
from llmkit_server.logs import configure_logs
from llmkit_server.middleware.custom import load_middleware
from llmkit_server.request_lines import RequestLines
from llmkit_server.tracing import Tracing, start_tracing

if TYPE_CHECKING:
    from fastapi import FastAPI

    from llmkit.execution.setup import LoadProgress

logger = logging.getLogger("llmkit.server")

ANSWERS_END_S = 2.0
"""How long requests that have not finished in time have to tell their clients so, before they are cancelled."""

THREADS_END_S = 2.0
"""How long the end of the process waits for threads that are still at something."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Server(uvicorn.Server):
    """uvicorn's server with llmkit's end: the first SIGTERM or SIGINT stops new requests and lets those under way
    finish, the second one ends them; both exit with 0. An engine that is gone for good ends the server with 1.

    finish_s: how long requests may take to finish; the engine is closed then, which their clients are told. ready:
    called once connections are accepted.
    """

    def __init__(
        self, config: uvicorn.Config, context: ServerContext, finish_s: float, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._finish_s = finish_s
        self._context = context
        self._ready = ready
        self.exit_code = 0

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup(sockets)  # type: ignore[arg-type]
        self._ready()

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        answers = asyncio.ensure_future(super().shutdown(sockets))  # type: ignore[arg-type]
        finished, _ = await asyncio.wait([answers], timeout=self._finish_s)
        if not finished:
            logger.warning("Requests that have not finished in %g s are ended.", self._finish_s)
            await self._context.llm.close()
        await answers

    async def on_tick(self, counter: int) -> bool:
        health = self._context.llm.health
        if not health.alive and not self.should_exit:
            logger.error("The engine has ended: %s", health.error or "no cause is known")
            self.exit_code = 1
            self.should_exit = True
        if self.should_exit:
            self._context.draining = True
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        del sig, frame
        self.force_exit = self.should_exit
        self.should_exit = True


def serve(config: EngineConfig, progress: LoadProgress | None, announce: Callable[[str], None]) -> int:
    """Load the model and serve it until a signal comes; returns the exit code. announce: called with a line for people.

    Settings that cannot work are refused before the model is loaded. Raises ConfigError, and what AsyncLLM does.
    """
    settings = config.server
    check_tls(settings)
    for name in settings.middleware:
        load_middleware(name)
    registry = Registry.discover(config.plugins)
    check_parsers(settings, registry)
    configure_logs(config)
    tracing = tracing_of(config)
    with ExitStack() as stack:
        listening = stack.enter_context(bound_socket(settings))
        llm = AsyncLLM(config=config, progress=progress)
        try:
            observe_requests(llm, tracing)
            app = create_app(llm, settings, registry)
            context: ServerContext = app.state.server
            server = Server(
                uvicorn_config(app, settings),
                context,
                settings.shutdown_timeout_s,
                lambda: announce(f"Serving {', '.join(context.models.names)} at {address_of(listening, settings)}"),
            )
        except BaseException:
            asyncio.run(llm.close())
            raise

        async def run() -> None:
            try:
                await server.serve([listening])
            finally:
                await llm.close()
                if tracing is not None:
                    await asyncio.to_thread(tracing.close)

        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(run())
            stack.close()
            leave_soon(server.exit_code)
    return server.exit_code


def leave_soon(code: int) -> None:
    """Let the interpreter end, which waits for its threads, but not long: one may be in the middle of a text that
    nobody waits for any more."""
    timer = threading.Timer(THREADS_END_S, os._exit, (code,))
    timer.daemon = True
    timer.start()


def tracing_of(config: EngineConfig) -> Tracing | None:
    """Where spans go; None if nowhere. Raises ConfigError."""
    endpoint, names = config.observability.otlp_traces_endpoint, config.server.served_model_names
    return None if endpoint is None else start_tracing(endpoint, (*names, config.model.model)[0])


def observe_requests(llm: AsyncLLM, tracing: Tracing | None) -> None:
    """Log and trace what ends."""
    observability = llm.config.observability
    if observability.log_requests:
        llm.on_request_ended.append(RequestLines(show_prompt=observability.log_prompts))
    if tracing is not None:
        llm.on_request_ended.append(tracing)


def check_parsers(settings: ServerConfig, registry: Registry) -> None:
    """Raises PluginError if a parser that was asked for by name cannot be used, ConfigError for its options."""
    for kind, choice in (("tool_parser", settings.tool_parser), ("reasoning_parser", settings.reasoning_parser)):
        if choice not in (None, "auto"):
            registry.create(kind, choice, detect_environment())


def uvicorn_config(app: FastAPI, settings: ServerConfig) -> uvicorn.Config:
    """Logs are ours; proxies' headers are not trusted, so that a client cannot choose its address."""
    return uvicorn.Config(
        app,
        http=connection_type(),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=round(settings.shutdown_timeout_s + ANSWERS_END_S),
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_NONE if settings.ssl_ca_certs is None else ssl.CERT_REQUIRED,
    )


def check_tls(settings: ServerConfig) -> None:
    """Raises ConfigError if the files of TLS cannot be used."""
    if settings.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Without this, OpenSSL would ask at the terminal for the password of an encrypted key.
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password=_no_password)
        if settings.ssl_ca_certs is not None:
            context.load_verify_locations(settings.ssl_ca_certs)
    except (OSError, ValueError) as error:
        raise ConfigError(f"server.ssl_certfile and its companions cannot be used: {error}.") from None


def _no_password() -> str:
    raise ValueError("the private key is encrypted, and there is nobody to ask for its password")
