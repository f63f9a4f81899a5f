"""The parts of a stream's chunks that clients here look at; everything else is skipped without being decoded."""

from __future__ import annotations

from typing import Any

import msgspec


class Delta(msgspec.Struct):
    """What is new of a chat's answer. Servers call reasoning by either name."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"null")


class Choice(msgspec.Struct):
    """News of one answer; `text` in completions, `delta` in chats."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        return (self.text if self.delta is None else self.delta.content) or ""

    @property
    def reasoning(self) -> str:
        return "" if self.delta is None else self.delta.reasoning or self.delta.reasoning_content or ""

    @property
    def brings_tokens(self) -> bool:
        """Whether the model has produced something: a chat's first chunk, which only has the role, does not count, nor
        does one that only ends an answer. A completion's chunk may have a token that is half a character."""
        delta = self.delta
        if delta is None:
            return bool(self.text) or self.finish_reason is None
        if delta.content or delta.reasoning or delta.reasoning_content:
            return True
        return bytes(delta.tool_calls) not in (b"null", b"[]")


class Used(msgspec.Struct):
    """Tokens of the whole request, as the server counts them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chunk(msgspec.Struct):
    """One event of a stream; `error` if it broke."""

    choices: list[Choice] = []
    usage: Used | None = None
    error: Any = None


decode_chunk = msgspec.json.Decoder(Chunk).decode
"""Raises msgspec.MsgspecError for what is no chunk."""


def error_text(body: bytes) -> str:
    """The message in the body of an error, in whichever of the usual forms; else the body's beginning."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeError, ValueError):
        return " ".join(body[:200].decode("utf-8", "replace").split())
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(key):
            value = value[key]
    return (value if isinstance(value, str) else msgspec.json.encode(value).decode())[:500]
