"""The path under which a proxy shows the server."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Tells the application of its root path, whether the proxy leaves that in the path of requests or takes it off."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if not path.startswith(f"{self._root_path}/"):
                path = self._root_path + path
            scope = {**scope, "root_path": self._root_path, "path": path}
        await self._app(scope, receive, send)
