"""/v1/models."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from llmkit_server.context import context_of
from llmkit_server.openapi import describe
from llmkit_server.protocol.models import ModelCard, ModelList, model_card
from llmkit_server.routes.names import NAME
from llmkit_server.streaming import json_response

router = APIRouter(prefix="/v1", tags=["models"])


@router.get("/models", openapi_extra=describe(response=ModelList))
async def list_models(request: Request) -> Response:
    """The names under which the model is served."""
    models = context_of(request).models
    return json_response(ModelList("list", [model_card(models, name) for name in models.names]))


@router.get(f"/models/{{name:{NAME}}}", openapi_extra=describe(response=ModelCard))
async def show_model(request: Request, name: str) -> Response:
    """One of them."""
    models = context_of(request).models
    return json_response(model_card(models, models.resolve(name)))
