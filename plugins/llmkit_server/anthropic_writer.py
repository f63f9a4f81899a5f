"""Answers in the shapes of Anthropic's API: a message, or the events that build one up."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Any

from pydantic_core import from_json

from llmkit import CompletionOutput, RequestOutput
from llmkit_server.answer_reader import AnswerParts, whole_calls
from llmkit_server.chat import StartedChat
from llmkit_server.context import ServerContext
from llmkit_server.errors import as_api_error
from llmkit_server.protocol.anthropic import (
    Block,
    Message,
    MessageUsage,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    error_body,
)
from llmkit_server.protocol.chat import ToolCall
from llmkit_server.streaming import named_event

UNREADABLE = "unreadable_arguments"
"""The key under which arguments that are no JSON object stand in `input`, as the model wrote them."""


class MessageWriter:
    """Writes the answer to one request."""

    def __init__(self, server: ServerContext, started: StartedChat, *, shows_reasoning: bool) -> None:
        self._generation = started.generation
        self._reader = started.reader(server, shows_reasoning=shows_reasoning)

    def message(self, output: RequestOutput) -> Message:
        """The whole answer."""
        (answer,) = output.outputs
        parts = self._reader.feed(answer.text, is_end=True)
        content: list[Block] = [ThinkingBlock(parts.reasoning)] if parts.reasoning else []
        content += [TextBlock(parts.content)] if parts.content else []
        content += [_tool_use(call) for call in whole_calls(parts.tool_calls)]
        return self._message(content, output, len(answer.token_ids), answer)

    def _message(
        self, content: list[Block], output: RequestOutput, num_tokens: int, answer: CompletionOutput | None
    ) -> Message:
        reason, sequence = (None, None) if answer is None else self._ending(answer)
        generation = self._generation
        return Message(generation.id, generation.model, content, reason, sequence, self._usage(output, num_tokens))

    def _usage(self, output: RequestOutput, num_tokens: int) -> MessageUsage:
        cached = output.num_cached_tokens
        return MessageUsage(self._generation.num_prompt_tokens - cached, num_tokens, cached)

    def _ending(self, answer: CompletionOutput) -> tuple[str, str | None]:
        """stop_reason and stop_sequence of an answer that has ended."""
        if answer.finish_reason == "length":
            return "max_tokens", None
        if self._reader.has_called:
            return "tool_use", None
        if isinstance(answer.stop_reason, str):
            return "stop_sequence", answer.stop_reason
        return "end_turn", None

    async def events(self) -> AsyncGenerator[bytes]:
        """The events of a stream. What goes wrong is an event, too."""
        try:
            async for data in self._events():
                yield data
        except Exception as error:
            problem = as_api_error(error)
            yield named_event("error", error=error_body(problem.status, problem.message, problem.param).error)

    async def _events(self) -> AsyncGenerator[bytes]:
        blocks, num_tokens, started = BlockEvents(), 0, False
        async for _, output in self._generation.outputs():
            (answer,) = output.outputs
            if not started:
                started = True
                yield named_event("message_start", message=self._message([], output, 0, None))
                yield named_event("ping")
            num_tokens += len(answer.token_ids)
            is_end = answer.finish_reason is not None
            for data in blocks.news(self._reader.feed(answer.text, is_end=is_end)):
                yield data
            if is_end:
                for data in blocks.end():
                    yield data
                reason, sequence = self._ending(answer)
                delta = {"stop_reason": reason, "stop_sequence": sequence}
                yield named_event("message_delta", delta=delta, usage=self._usage(output, num_tokens))
        yield named_event("message_stop")


class BlockEvents:
    """The events of a stream's blocks: one block is open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._open: tuple[str, int | None] | None = None

    def news(self, parts: AnswerParts) -> Iterator[bytes]:
        """What a piece of the answer has brought."""
        if parts.reasoning:
            yield from self._in_block("thinking", None, ThinkingBlock(""))
            yield self._delta({"type": "thinking_delta", "thinking": parts.reasoning})
        if parts.content:
            yield from self._in_block("text", None, TextBlock(""))
            yield self._delta({"type": "text_delta", "text": parts.content})
        for call in parts.tool_calls:
            yield from self._in_block("tool_use", call.index, ToolUseBlock(call.id or "", call.function.name or "", {}))
            if call.function.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": call.function.arguments})

    def _in_block(self, kind: str, number: int | None, block: Block) -> Iterator[bytes]:
        if self._open == (kind, number):
            return
        yield from self.end()
        self._index += 1
        self._open = (kind, number)
        yield named_event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event("content_block_delta", index=self._index, delta=delta)

    def end(self) -> Iterator[bytes]:
        """The open block ends."""
        if self._open is not None:
            self._open = None
            yield named_event("content_block_stop", index=self._index)


def _tool_use(call: ToolCall) -> ToolUseBlock:
    return ToolUseBlock(call.id or "", call.function.name or "", read_input(call.function.arguments))


def read_input(arguments: str) -> dict[str, Any]:
    """Arguments as an object; of a text that breaks off, what is there."""
    try:
        value = from_json(arguments or "{}", allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {UNREADABLE: arguments}
