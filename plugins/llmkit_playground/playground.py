"""Front door of the extension `playground`."""

from __future__ import annotations

from typing import Any

from llmkit.hookspecs import PluginInfo, hookimpl

info = PluginInfo(summary="a page at / with a chat and a live view of the engine")


@hookimpl
def llmkit_server_routes(app: Any, server: Any) -> None:
    """Serve the page, its files and its data."""
    from llmkit_playground.routes import add_routes

    add_routes(app, server)
