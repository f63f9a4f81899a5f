"""Lines of a batch file: requests in, results out."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from llmkit.errors import shown

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""What a batch may call, where the server has it."""


@dataclass(frozen=True)
class BatchRequest:
    """One line that can be sent: where to, and the body as JSON."""

    custom_id: str
    url: str
    body: bytes


class LineError(Exception):
    """A line that cannot be sent. custom_id: None if it has none that can be read. code: one word for programs."""

    def __init__(self, message: str, custom_id: str | None = None, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.custom_id = custom_id
        self.code = code


def parse_line(line: bytes, urls: frozenset[str]) -> BatchRequest:
    """A line of the input. Raises LineError."""
    try:
        value = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeError, ValueError, RecursionError) as error:
        raise LineError(f"The line is not JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise LineError("The line is not a JSON object.")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError(f"custom_id must be a text, got {shown(custom_id)}.")
    if value.get("method", "POST") != "POST":
        raise LineError(f"method must be POST, got {shown(value['method'])}.", custom_id)
    url, body = value.get("url"), value.get("body")
    if not isinstance(url, str) or url not in urls:
        raise LineError(f"url must be one of {', '.join(sorted(urls))}, got {shown(url)}.", custom_id)
    if not isinstance(body, dict):
        raise LineError(f"body must be an object, got {shown(body)}.", custom_id)
    if body.get("stream"):
        raise LineError("body.stream: answers in a file cannot be streamed.", custom_id)
    return BatchRequest(custom_id, url, msgspec.json.encode(body))


def answered(custom_id: str, status: int, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    """The result for a response, whatever its status."""
    response = {
        "status_code": status,
        "request_id": headers.get("x-request-id", ""),
        "body": msgspec.Raw(body) if body else None,
    }
    return {"id": _id(), "custom_id": custom_id, "response": response, "error": None}


def unanswered(error: LineError) -> dict[str, Any]:
    """The result for a line that was not sent."""
    problem = {"code": error.code, "message": str(error)}
    return {"id": _id(), "custom_id": error.custom_id, "response": None, "error": problem}


def _id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
