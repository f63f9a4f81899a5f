"""What goes wrong between a client and a server."""

from __future__ import annotations

from llmkit.errors import LlmkitError


class RemoteError(LlmkitError):
    """A server could not be reached, or has refused or failed a request.

    kind: the HTTP status as text, or "connection", "timeout", "stream" (the answer broke off or makes no sense).
    """

    def __init__(self, message: str, kind: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind
