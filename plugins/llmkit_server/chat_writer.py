"""Chats: from outputs to the response or its chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

import msgspec

from llmkit import CompletionOutput, RequestOutput
from llmkit_server.answer_reader import AnswerParts, AnswerReader, whole_calls
from llmkit_server.context import ServerContext
from llmkit_server.generation import Generation
from llmkit_server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from llmkit_server.protocol.base import FINGERPRINT, Usage, usage
from llmkit_server.protocol.chat import (
    ChatChoice,
    ChatChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    ChunkChoice,
)
from llmkit_server.streaming import event
from llmkit_server.tool_use import ToolUse

ROLE = "assistant"


@dataclass
class _Choice:
    """One answer of a stream: its reader, and how many tokens there were."""

    reader: AnswerReader
    num_tokens: int = 0


class ChatWriter:
    """Writes the outputs of one request."""

    def __init__(
        self, server: ServerContext, generation: Generation, body: ChatRequest, use: ToolUse, prompt_tail: str
    ) -> None:
        self._server = server
        self._generation = generation
        self._body = body
        self._use = use
        self._prompt_tail = prompt_tail
        self._names = TokenNames(server.llm.tokenizer, bool(body.return_tokens_as_token_ids))
        self._echoed = _echoed(body)

    def _reader(self) -> AnswerReader:
        reasoning = self._server.reasoning_format
        return AnswerReader(
            None if reasoning is None else reasoning.parser(self._prompt_tail),
            self._use.parser(),
            parallel=self._use.parallel,
            shows_reasoning=self._body.include_reasoning is not False,
        )

    def response(self, output: RequestOutput) -> ChatResponse:
        """The whole answer."""
        generation, body = self._generation, self._body
        num_tokens = sum(len(answer.token_ids) for answer in output.outputs)
        result = ChatResponse(
            generation.id,
            "chat.completion",
            generation.created,
            generation.model,
            [self._whole_choice(answer) for answer in output.outputs],
            FINGERPRINT,
            usage(generation.num_prompt_tokens, num_tokens, output.num_cached_tokens),
            kv_transfer_params=output.kv_transfer_params,
        )
        if body.prompt_logprobs is not None:
            result.prompt_logprobs = prompt_logprobs(output.prompt_logprobs, body.prompt_logprobs)
        if body.return_token_ids:
            result.prompt_token_ids = output.prompt_token_ids
        return result

    def _whole_choice(self, answer: CompletionOutput) -> ChatChoice:
        reader = self._reader()
        parts = reader.feed(answer.text, is_end=True)
        calls = whole_calls(parts.tool_calls)
        content = self._echoed + parts.content
        message = ChatMessage(
            ROLE,
            None if calls and not content else content,
            None,
            reasoning=parts.reasoning or None,
            tool_calls=calls or None,
        )
        choice = ChatChoice(
            answer.index, message, self._logprobs(answer), self._finish_reason(answer, reader), answer.stop_reason
        )
        if self._body.return_token_ids:
            choice.token_ids = list(answer.token_ids)
        return choice

    def _logprobs(self, answer: CompletionOutput) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return ChatLogprobs(chat_logprobs(answer.logprobs or (), self._body.top_logprobs or 0, self._names))

    def _finish_reason(self, answer: CompletionOutput, reader: AnswerReader) -> str | None:
        """As OpenAI has it: an answer that calls tools of its own choice ends with "tool_calls"."""
        if answer.finish_reason == "stop" and reader.has_called and self._use.choice in ("auto", "required"):
            return "tool_calls"
        return answer.finish_reason

    async def events(self) -> AsyncGenerator[bytes]:
        """The chunks of a stream."""
        choices: dict[int, _Choice] = {}
        cached = 0
        body = self._body
        async for _, output in self._generation.outputs():
            cached = output.num_cached_tokens
            for answer in output.outputs:
                choice = choices.get(answer.index)
                is_first = choice is None
                if choice is None:
                    choice = choices[answer.index] = _Choice(self._reader())
                choice.num_tokens += len(answer.token_ids)
                used = self._usage(choices, cached) if body.continuous_usage else None
                for chunk in self._news(answer, choice.reader, is_first):
                    chunk.usage = used if body.includes_usage else msgspec.UNSET
                    if is_first and body.return_token_ids:
                        chunk.prompt_token_ids = output.prompt_token_ids
                        is_first = False
                    if chunk.choices[0].finish_reason is not None:
                        chunk.kv_transfer_params = output.kv_transfer_params
                    yield event(chunk)
        if body.includes_usage:
            chunk = self._chunk([])
            chunk.usage = self._usage(choices, cached)
            yield event(chunk)

    def _usage(self, choices: dict[int, _Choice], cached: int) -> Usage:
        num_tokens = sum(choice.num_tokens for choice in choices.values())
        return usage(self._generation.num_prompt_tokens, num_tokens, cached)

    def _news(self, answer: CompletionOutput, reader: AnswerReader, is_first: bool) -> Iterator[ChatChunk]:
        """The chunks for what is new of one answer: the role before anything else, the end by itself."""
        index = answer.index
        if is_first:
            yield self._chunk([ChunkChoice(index, ChatDelta(role=ROLE, content=self._echoed), None, None)])
        is_end = answer.finish_reason is not None
        parts = reader.feed(answer.text, is_end=is_end)
        logprobs = self._logprobs(answer) if answer.token_ids else None
        token_ids = list(answer.token_ids) if self._body.return_token_ids and answer.token_ids else None
        if parts or logprobs is not None or token_ids is not None:
            yield self._chunk([ChunkChoice(index, _delta(parts), logprobs, None, token_ids=token_ids)])
        if is_end:
            reason = self._finish_reason(answer, reader)
            yield self._chunk([ChunkChoice(index, ChatDelta(), None, reason, answer.stop_reason)])

    def _chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        generation = self._generation
        return ChatChunk(
            generation.id, "chat.completion.chunk", generation.created, generation.model, choices, FINGERPRINT
        )


def _delta(parts: AnswerParts) -> ChatDelta:
    return ChatDelta(
        content=parts.content if parts.content or not (parts.reasoning or parts.tool_calls) else None,
        reasoning=parts.reasoning or None,
        tool_calls=parts.tool_calls or None,
    )


def _echoed(body: ChatRequest) -> str:
    """With echo, an answer that goes on with the assistant's last message begins with that."""
    last = body.messages[-1]
    if body.echo and last.get("role") == ROLE and isinstance(last.get("content"), str):
        return str(last["content"])
    return ""
