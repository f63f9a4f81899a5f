"""What comes in over HTTP, by route and status, and what is refused."""

from __future__ import annotations

from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

REFUSALS = {401: "unauthorized", 408: "body_timeout", 413: "body_too_large", 429: "too_many", 503: "unavailable"}
"""Status → reason of the refusals that say something about the server, not the request."""

_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})


class HttpCounts:
    """responses: by method, route and status. The routes are those that the server has, all other paths are "other":
    clients do not decide how many there are. in_progress: requests whose response has not ended."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, str, int]] = Counter()
        self.refusals: Counter[str] = Counter(dict.fromkeys(REFUSALS.values(), 0))
        self.in_progress = 0

    def count(self, scope: Scope, status: int) -> None:
        """One more response; status 0: it never began, the client was gone."""
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = getattr(scope.get("route"), "path", "other")
        self.responses[method, route, status or 499] += 1
        if status in REFUSALS:
            self.refusals[REFUSALS[status]] += 1


class HttpMetrics:
    """Middleware that counts in `counts`."""

    def __init__(self, app: ASGIApp, counts: HttpCounts) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._counts.in_progress += 1
        try:
            await self._app(scope, receive, send_noted)
        except BaseException:
            status = status or 500
            raise
        finally:
            self._counts.in_progress -= 1
            self._counts.count(scope, status)
