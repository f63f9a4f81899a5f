"""The application: routes, middleware, and what they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from llmkit.answers.formats import reasoning_format, tool_format
from llmkit.config import EngineConfig, ServerConfig
from llmkit.engine.factory import active_extensions
from llmkit.registry import Registry, detect_environment
from llmkit_server.admission import Admission, RateLimiter
from llmkit_server.context import ServedModels, ServerContext
from llmkit_server.errors import install_error_handlers
from llmkit_server.metrics.http_counts import HttpMetrics
from llmkit_server.middleware.anthropic_errors import AnthropicErrors
from llmkit_server.middleware.body_limit import BodyLimit
from llmkit_server.middleware.custom import load_middleware, wrap
from llmkit_server.middleware.keys import Keys
from llmkit_server.middleware.request_log import RequestLog
from llmkit_server.middleware.root_path import RootPath
from llmkit_server.openapi import openapi_of
from llmkit_server.responses.store import ResponseStore
from llmkit_server.routes import (
    anthropic,
    chat,
    completions,
    control,
    embeddings,
    health,
    inference,
    metrics,
    models,
    responses,
    tokens,
)

if TYPE_CHECKING:
    from llmkit import AsyncLLM

ROUTERS: tuple[APIRouter, ...] = (
    health.router,
    metrics.router,
    models.router,
    tokens.router,
    completions.router,
    chat.router,
    anthropic.router,
    embeddings.router,
    inference.router,
    responses.router,
)
"""What is always served. A new endpoint is a module in `routes` and its router here."""

PAGE = "playground"
"""The extension behind server.playground."""

CONTROL_ROUTERS: tuple[APIRouter, ...] = (control.router,)
"""Only with server.enable_control_endpoints."""


def create_app(llm: AsyncLLM, settings: ServerConfig | None = None, registry: Registry | None = None) -> FastAPI:
    """The application that serves `llm`, which stays its caller's to close.

    settings: default: those in the engine's configuration. registry: default: the plugins installed. Raises ConfigError
    for middleware that cannot be loaded, PluginError for a parser or an extension that cannot be used.
    """
    settings = llm.config.server if settings is None else settings
    app = FastAPI(
        title="llmkit",
        openapi_url="/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.server = server_context(llm, settings, registry or Registry.discover(llm.config.plugins))
    for router in (*ROUTERS, *(CONTROL_ROUTERS if settings.enable_control_endpoints else ())):
        app.include_router(router)
    _add_extensions(app, llm.config)
    install_error_handlers(app)
    app.openapi = openapi_of(app, settings.root_path)  # type: ignore[method-assign]
    _add_middleware(app, settings)
    return app


def _add_extensions(app: FastAPI, config: EngineConfig) -> None:
    """The routes of active extensions. They stand behind the server's own, and cannot replace them."""
    server: ServerContext = app.state.server
    for name in (*active_extensions(config), *_page(server)):
        plugin = server.registry.load("extension", name)
        if plugin.implements("llmkit_server_routes"):
            plugin.ask("llmkit_server_routes", app=app, server=server)


def _page(server: ServerContext) -> tuple[str, ...]:
    """The extension that shows a page, unless that is switched off or whoever runs this has disabled it."""
    usable = any(row.name == PAGE and row.state in ("found", "loaded") for row in server.registry.find("extension"))
    active = server.llm.config.extensions
    return (PAGE,) if server.settings.playground and usable and PAGE not in active else ()


def server_context(llm: AsyncLLM, settings: ServerConfig, registry: Registry) -> ServerContext:
    """Raises PluginError, and ConfigError for options of a parser."""
    names = settings.served_model_names or (llm.config.model.model,)
    models_served = ServedModels(tuple(dict.fromkeys(names)), llm.config.model.model, llm.limits.max_model_len)
    running = llm.config.scheduler.max_num_seqs
    assert running is not None
    template = llm.input_processor.chat_template
    source, environment = None if template is None else template.source, detect_environment()
    return ServerContext(
        llm,
        settings,
        models_served,
        Admission(running + settings.max_queue),
        registry,
        ResponseStore(settings.max_stored_responses, settings.max_stored_response_bytes),
        tool_format(registry, settings.tool_parser, source, environment),
        reasoning_format(registry, settings.reasoning_parser, source, environment),
    )


def _add_middleware(app: FastAPI, settings: ServerConfig) -> None:
    """Innermost first: what is added last sees a request first."""
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    for name in reversed(settings.middleware):
        app.add_middleware(_Custom, middleware=load_middleware(name))
    limiter = None if settings.rate_limit is None else RateLimiter(settings.rate_limit)
    app.add_middleware(Keys, api_keys=settings.api_keys, rate_limiter=limiter)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
            expose_headers=["x-request-id", "x-llmkit-unknown-fields", "retry-after"],
        )
    app.add_middleware(AnthropicErrors)
    app.add_middleware(HttpMetrics, counts=app.state.server.http_counts)
    app.add_middleware(RequestLog, access_log=settings.access_log)
    if settings.root_path:
        app.add_middleware(RootPath, root_path=settings.root_path)


class _Custom:
    """Middleware of the operator's own, in the form that applications take."""

    def __init__(self, app: ASGIApp, middleware: object) -> None:
        self._app = wrap(app, middleware)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
