"""The server's own OpenAPI description: bodies are read and written without FastAPI's help, so it is told of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

import llmkit
from llmkit_server.errors import ErrorBody

REF = "#/components/schemas/{name}"

_bodies: dict[str, type[BaseModel]] = {}
_structs: dict[str, type[msgspec.Struct]] = {"ErrorBody": ErrorBody}


def describe(
    body: type[BaseModel] | None = None,
    response: type[msgspec.Struct] | None = None,
    *,
    streams: bool = False,
    error: type[msgspec.Struct] = ErrorBody,
) -> dict[str, Any]:
    """`openapi_extra` of a route. streams: with stream: true it sends events. error: the body of its errors."""
    extra: dict[str, Any] = {}
    if body is not None:
        _bodies[body.__name__] = body
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(body)}}}
    content: dict[str, Any] = {}
    _structs[error.__name__] = error
    if response is not None:
        _structs[response.__name__] = response
        content["application/json"] = {"schema": _ref(response)}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    extra["responses"] = {
        "200": {"description": "Done.", **({"content": content} if content else {})},
        "default": {
            "description": "What is wrong.",
            "content": {"application/json": {"schema": _ref(error)}},
        },
    }
    return extra


def _ref(model: type) -> dict[str, str]:
    return {"$ref": REF.format(name=model.__name__)}


def openapi_of(app: FastAPI, root_path: str) -> Callable[[], dict[str, Any]]:
    """For `app.openapi`. root_path: where clients find the server behind a proxy."""

    def build() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app) | ({"servers": [{"url": root_path}]} if root_path else {})
        return app.openapi_schema

    return build


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title="llmkit", version=llmkit.__version__, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name, model in _bodies.items():
        schema = model.model_json_schema(ref_template=REF.replace("{name}", "{model}"))
        schemas.update(schema.pop("$defs", {}))
        schemas[name] = schema
    _, structs = msgspec.json.schema_components(_structs.values(), ref_template=REF)
    schemas.update(structs)
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            done = operation["responses"].get("200", {})
            if done.get("content") == {"application/json": {"schema": {}}}:
                del done["content"]  # FastAPI's guess, where there is no body
    return document
