"""/v1/embeddings and /pooling, and what only models with a head of their own can do."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from llmkit_server.body import read_body
from llmkit_server.context import context_of
from llmkit_server.embeddings import Embedder, usage_of
from llmkit_server.errors import bad_request, unsupported
from llmkit_server.openapi import describe
from llmkit_server.protocol.embeddings import (
    Embedding,
    EmbeddingRequest,
    EmbeddingResponse,
    Pooled,
    PoolingRequest,
    PoolingResponse,
)
from llmkit_server.streaming import json_response

router = APIRouter(tags=["pooling"])


@router.post("/v1/embeddings", openapi_extra=describe(EmbeddingRequest, EmbeddingResponse))
async def embeddings(request: Request) -> Response:
    """A vector for each input, made of the model's last hidden states."""
    embedder = Embedder(context_of(request), request, await read_body(request, EmbeddingRequest), "embd-")
    outputs = await embedder.run()
    data = [Embedding(index, embedder.written(output)) for index, output in enumerate(outputs)]
    response = EmbeddingResponse(embedder.id, "list", embedder.created, embedder.model, data, usage_of(outputs))
    return json_response(response, embedder.headers)


@router.post("/pooling", openapi_extra=describe(PoolingRequest, PoolingResponse))
async def pooling(request: Request) -> Response:
    """As /v1/embeddings, in the shape that clients of pooling models know."""
    body = await read_body(request, PoolingRequest)
    if not isinstance(body.task, str | None):
        raise bad_request("task must be a text.", "task")
    if body.task not in (None, "embed"):
        raise unsupported(f"The model can only embed, not {body.task[:64]!r}.", "task")
    embedder = Embedder(context_of(request), request, body, "pool-")
    outputs = await embedder.run()
    data = [Pooled(index, embedder.written(output)) for index, output in enumerate(outputs)]
    response = PoolingResponse(embedder.id, "list", embedder.created, embedder.model, data, usage_of(outputs))
    return json_response(response, embedder.headers)


@router.post("/classify", openapi_extra=describe())
@router.post("/score", openapi_extra=describe())
@router.post("/v1/score", openapi_extra=describe())
@router.post("/rerank", openapi_extra=describe())
@router.post("/v1/rerank", openapi_extra=describe())
@router.post("/v2/rerank", openapi_extra=describe())
async def needs_another_model() -> Response:
    """501: these need a model with a head that classifies or compares, and this server runs models that write."""
    raise unsupported(
        "The model writes text: it has no head for classes or scores. /v1/embeddings gives vectors to compare.", "model"
    )
