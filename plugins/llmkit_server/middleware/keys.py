"""API keys and the rate of each client."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from llmkit_server.admission import RateLimiter
from llmkit_server.errors import ApiError
from llmkit_server.middleware.paths import is_guarded


class Keys:
    """Refuses guarded requests without a valid key, and those that come too fast.

    Sets `scope["state"]["client"]`: "key-N" by the key's place in the settings, else the client's address.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], rate_limiter: RateLimiter | None) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in api_keys]
        self._rate_limiter = rate_limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_guarded(scope):
            try:
                client = self._client(scope)
                scope.setdefault("state", {})["client"] = client
                if self._rate_limiter is not None and scope["method"] == "POST":
                    self._rate_limiter.check(client)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _client(self, scope: Scope) -> str:
        if not self._digests:
            return scope["client"][0] if scope.get("client") else "local"
        given = _given_key(Headers(scope=scope))
        if given is None:
            raise _unauthorised("This server needs an API key: send it as Authorization: Bearer KEY.")
        digest = _digest(given)
        # Every key is compared, and whole: the time says nothing about how near the guess was.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise _unauthorised("The API key is not valid.")
        return f"key-{matches.index(True) + 1}"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _given_key(headers: Headers) -> bytes | None:
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return _header_bytes(credentials.strip())
    key = headers.get("x-api-key", "").strip()
    return _header_bytes(key) if key else None


def _header_bytes(text: str) -> bytes:
    """What the client sent: Starlette reads header bytes as Latin-1."""
    return text.encode("latin-1")


def _unauthorised(message: str) -> ApiError:
    return ApiError(401, message, headers={"www-authenticate": "Bearer"})
