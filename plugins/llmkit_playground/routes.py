"""The page, its files and its data."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from llmkit_playground.live import LiveView

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing comes from another host, nothing inline is run, and no other page may show this one."""

_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

_FILES = {
    "/": ("index.html", "text/html"),
    "/playground/app.js": ("app.js", "text/javascript"),
    "/playground/chat.js": ("chat.js", "text/javascript"),
    "/playground/live.js": ("live.js", "text/javascript"),
    "/playground/style.css": ("style.css", "text/css"),
    "/playground/icon.svg": ("icon.svg", "image/svg+xml"),
}


def add_routes(app: FastAPI, server: Any) -> None:
    """None of them is part of the API that the server describes."""
    folder = files("llmkit_playground") / "static"
    for path, (name, media_type) in _FILES.items():
        content = (folder / name).read_bytes()
        app.add_api_route(path, _file(content, media_type), include_in_schema=False, response_model=None)

    view = LiveView(server)

    async def state() -> Response:
        return JSONResponse(await view.state(), headers=_HEADERS | {"cache-control": "no-store"})

    app.add_api_route("/playground/state", state, include_in_schema=False, response_model=None)


def _file(content: bytes, media_type: str) -> Any:
    async def send() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return send
