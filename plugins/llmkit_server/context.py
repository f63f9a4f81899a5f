"""What routes, middleware and extensions know of the server they belong to."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from starlette.requests import Request

from llmkit.config import ServerConfig
from llmkit_server.admission import Admission
from llmkit_server.errors import RETRY_SOON, ApiError
from llmkit_server.metrics.engine_watch import EngineWatch
from llmkit_server.metrics.http_counts import HttpCounts
from llmkit_server.responses.store import ResponseStore
from llmkit_server.text_threads import TextThreads

if TYPE_CHECKING:
    from llmkit import AsyncLLM
    from llmkit.frontend.tokenizer import Tokenizer
    from llmkit.hookspecs.reasoning_parser import ReasoningFormat
    from llmkit.hookspecs.tool_parser import ToolFormat
    from llmkit.registry import Registry


@dataclass(frozen=True)
class ServedModels:
    """The names under which the one model is served. root: the model as the engine was given it."""

    names: tuple[str, ...]
    root: str
    max_model_len: int
    created: int = field(default_factory=lambda: int(time.time()))

    def resolve(self, name: str | None) -> str:
        """The name to answer with: the asked one, the first if none is asked for. Raises ApiError 404."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise ApiError(
                404, f"The model {name[:256]!r} does not exist; there is {', '.join(self.names)}.", param="model"
            )
        return name


@dataclass
class ServerContext:
    """Everything about a running server. `app.state.server`.

    registry: the plugins of this process. draining: no new work is taken, the server is about to end.
    responses: those of /v1/responses that are kept. tool_format, reasoning_format: of the parsers chosen. extras: for
    extensions, by their names. http_counts, engine_watch: numbers about this server and its engine. text_threads: for
    work on long texts.
    """

    llm: AsyncLLM
    settings: ServerConfig
    models: ServedModels
    admission: Admission
    registry: Registry
    responses: ResponseStore
    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None
    draining: bool = False
    extras: dict[str, Any] = field(default_factory=dict)
    http_counts: HttpCounts = field(default_factory=HttpCounts)
    engine_watch: EngineWatch = field(init=False)
    text_threads: TextThreads = field(default_factory=TextThreads)

    def __post_init__(self) -> None:
        self.engine_watch = EngineWatch(self.llm)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's. Raises ApiError 501 if it has none."""
        tokenizer = self.llm.tokenizer
        if tokenizer is None:
            raise ApiError(501, "The model has no tokenizer; only token ids go in and out.")
        return tokenizer

    def check_ready(self) -> None:
        """Raises ApiError 503 if no request can be taken now."""
        if self.draining:
            raise ApiError(503, "The server is shutting down.", headers=RETRY_SOON)
        health = self.llm.health
        if not health.alive:
            raise ApiError(503, f"The engine has ended: {health.error or 'no cause is known'}.", headers=RETRY_SOON)
        if not health.ready:
            raise ApiError(503, "The engine is being started again.", headers=RETRY_SOON)


def context_of(request: Request) -> ServerContext:
    """The server that a request came to."""
    return cast(ServerContext, request.app.state.server)
