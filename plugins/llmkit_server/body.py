"""The body of a request: read within limits, strictly decoded, checked, unknown fields named."""

from __future__ import annotations

import asyncio
import codecs
import json
import logging
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from llmkit_server.errors import ApiError, bad_request, validation_problem
from llmkit_server.limits import BODY_TIMEOUT_S, MAX_DEPTH, MAX_FIELDS_NAMED
from llmkit_server.protocol.base import RequestBody

logger = logging.getLogger("llmkit.server")

BodyT = TypeVar("BodyT", bound=RequestBody)

UNKNOWN_FIELDS_HEADER = "x-llmkit-unknown-fields"


async def read_body(request: Request, model: type[BodyT]) -> BodyT:
    """The body as `model`. Raises ApiError: 400 naming the field, 408 if it does not come, 413 if it is too large, 415
    if it is not declared as JSON (web pages of others could send it then without asking the browser) or compressed."""
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared != "application/json" and not declared.endswith("+json"):
        raise ApiError(415, "The body must be JSON, with the header Content-Type: application/json.")
    encodings = {part.strip().lower() for part in ",".join(request.headers.getlist("content-encoding")).split(",")}
    if encodings - {"", "identity"}:
        raise ApiError(415, "The body must be sent as it is: this server takes no Content-Encoding but identity.")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            data = await request.body()
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {BODY_TIMEOUT_S:g} s.") from None
    except ClientDisconnect:
        raise bad_request("The client went away before the body was complete.") from None
    return parse_body(decode_json(data), model)


def parse_body(value: Any, model: type[BodyT]) -> BodyT:
    """A decoded body as `model`. Raises ApiError."""
    if not isinstance(value, dict):
        raise bad_request(f"The body must be a JSON object, not {_json_type(value)}.")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise validation_problem(error.errors(include_url=False, include_context=False)) from None


def decode_json(data: bytes) -> Any:
    """Strict JSON: UTF-8, no NaN or Infinity, no lone surrogates, at most MAX_DEPTH levels. Raises ApiError."""
    if not data:
        raise bad_request("The body is empty; it must be a JSON object.")
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.MsgspecError, UnicodeError, ValueError) as error:
        raise bad_request(f"The body is not valid JSON: {_why(data, error)}.") from None
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    return value


def _why(data: bytes, error: Exception) -> str:
    """What is wrong with the body, in the words of a parser that tells where."""
    try:
        json.loads(data.decode())  # of bytes it would guess the encoding
    except UnicodeDecodeError as found:
        return f"it is not UTF-8 at byte {found.start}"
    except json.JSONDecodeError as found:
        return "it begins with a byte-order mark" if data.startswith(codecs.BOM_UTF8) else str(found).rstrip(".")
    except (ValueError, RecursionError):
        return "a number is out of range"
    if "range" in str(error):
        return "a number is out of range"
    return "it holds NaN, Infinity or half of a surrogate pair"


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for item in level
            for inner in (item.values() if isinstance(item, dict) else item)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ApiError:
    return bad_request(f"The body is nested too deeply: at most {MAX_DEPTH} levels of lists and objects.")


def _json_type(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def unknown_fields_headers(body: RequestBody, request_id: str, more: Iterable[str] = ()) -> dict[str, str]:
    """The header that names fields of the body which nothing reads, if there are any; a line in the log says so too.
    more: such fields within others."""
    unknown = sorted([*(body.model_extra or ()), *more])
    if not unknown:
        return {}
    named = [_header_word(name) for name in unknown[:MAX_FIELDS_NAMED]]
    if len(unknown) > MAX_FIELDS_NAMED:
        named.append(f"and {len(unknown) - MAX_FIELDS_NAMED} more")
    text = ", ".join(named)
    logger.warning("request %s: unknown fields are ignored: %s", request_id, text)
    return {UNKNOWN_FIELDS_HEADER: text}


def _header_word(name: str) -> str:
    return "".join(c if c.isascii() and c.isprintable() and c not in ",;" else "?" for c in name[:64])
