"""The answer as items, built up as it comes, and the events that tell of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from llmkit_server.answer_reader import AnswerParts
from llmkit_server.protocol.chat import TokenLogprob, ToolCall
from llmkit_server.protocol.responses import Item
from llmkit_server.responses.items import new_id

Event = tuple[str, dict[str, Any]]
"""Name and fields of an event, without its number."""


class OutputItems:
    """The items of one answer. One is open at a time; each grows by deltas and is closed by the next, or the end.

    with_logprobs: whether texts have log-probabilities.
    """

    def __init__(self, *, with_logprobs: bool) -> None:
        self.items: list[Item] = []
        self.reasoning = ""
        self._with_logprobs = with_logprobs
        self._open: tuple[str, int | None] | None = None

    def news(self, parts: AnswerParts, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[Event]:
        """What a piece of the answer has brought. logprobs: of the piece's tokens; those of text are kept."""
        if parts.reasoning:
            yield from self._in_item("reasoning", None)
            self.reasoning += parts.reasoning
            self._last["content"][0]["text"] += parts.reasoning
            yield self._text_event("response.reasoning_text.delta", delta=parts.reasoning)
        if parts.content:
            yield from self._in_item("message", None)
            part, entries = self._last["content"][0], msgspec.to_builtins(logprobs)
            part["text"] += parts.content
            if self._with_logprobs:
                part["logprobs"] += entries
            yield self._text_event("response.output_text.delta", delta=parts.content, logprobs=entries)
        for call in parts.tool_calls:
            yield from self._in_item("function_call", call.index, call)
            if call.function.arguments:
                self._last["arguments"] += call.function.arguments
                yield self._event("response.function_call_arguments.delta", delta=call.function.arguments)

    def end(self, status: str) -> Iterator[Event]:
        """The answer has ended. status: of the item that was open. An answer of nothing is an empty message."""
        if not self.items:
            yield from self._in_item("message", None)
        yield from self._close(status)

    @property
    def _last(self) -> Item:
        return self.items[-1]

    def _event(self, name: str, /, **fields: Any) -> Event:
        return name, {"item_id": self._last["id"], "output_index": len(self.items) - 1, **fields}

    def _text_event(self, name: str, /, **fields: Any) -> Event:
        return self._event(name, content_index=0, **fields)

    def _item_event(self, name: str) -> Event:
        return name, {"output_index": len(self.items) - 1, "item": _copied(self._last)}

    def _in_item(self, kind: str, number: int | None, call: ToolCall | None = None) -> Iterator[Event]:
        if self._open == (kind, number):
            return
        yield from self._close("completed")
        self._open = (kind, number)
        self.items.append(_new_item(kind, call))
        yield self._item_event("response.output_item.added")
        if kind != "function_call":
            part = self._new_part(kind)
            yield self._text_event("response.content_part.added", part=_copied(part))
            self._last["content"].append(part)

    def _new_part(self, kind: str) -> Item:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": ""}
        part: Item = {"type": "output_text", "text": "", "annotations": []}
        return part | {"logprobs": []} if self._with_logprobs else part

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        kind, _ = self._open
        self._open = None
        item = self._last
        if kind == "function_call":
            yield self._event("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            part = item["content"][0]
            if kind == "message":
                entries = part.get("logprobs", [])
                yield self._text_event("response.output_text.done", text=part["text"], logprobs=entries)
            else:
                yield self._text_event("response.reasoning_text.done", text=part["text"])
            yield self._text_event("response.content_part.done", part=part)
        item["status"] = status
        yield self._item_event("response.output_item.done")


def _new_item(kind: str, call: ToolCall | None) -> Item:
    if kind == "reasoning":
        return {"id": new_id("rs"), "type": kind, "summary": [], "content": [], "status": "in_progress"}
    if kind == "message":
        return {"id": new_id("msg"), "type": kind, "role": "assistant", "content": [], "status": "in_progress"}
    assert call is not None
    return {
        "id": new_id("fc"),
        "type": kind,
        "call_id": call.id,
        "name": call.function.name,
        "arguments": "",
        "status": "in_progress",
    }


def _copied(item: Item) -> Item:
    """As it is now: it goes on growing."""
    return {name: list(value) if isinstance(value, list) else value for name, value in item.items()}
