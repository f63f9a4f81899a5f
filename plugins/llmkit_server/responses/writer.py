"""From outputs of the engine to a response, and to the numbered events of its stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from llmkit import RequestOutput
from llmkit_server.chat import StartedChat
from llmkit_server.context import ServerContext
from llmkit_server.errors import ApiError, as_api_error
from llmkit_server.logprobs import TokenNames, chat_logprobs
from llmkit_server.protocol.chat import TokenLogprob
from llmkit_server.protocol.responses import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponseRequest,
    ResponseUsage,
)
from llmkit_server.responses.output import Event, OutputItems
from llmkit_server.responses.request import response_format, wants_logprobs
from llmkit_server.streaming import named_event


def new_response(response_id: str, model: str, body: ResponseRequest, started: StartedChat) -> ResponseObject:
    """The response as it is when its work begins."""
    reasoning = body.reasoning or {}
    text = dict(body.text or {})
    if response_format(body.text) is None:
        text["format"] = {"type": "text"}
    return ResponseObject(
        id=response_id,
        created_at=started.generation.created,
        model=model,
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": reasoning.get("effort"), "summary": None},
        safety_identifier=body.safety_identifier,
        store=body.store is not False,
        temperature=started.params.temperature,
        text=text,
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=[{"description": None, "parameters": None, "strict": None, **tool} for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=started.params.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
        status="queued" if body.background else "in_progress",
    )


class ResponseWriter:
    """Reads the answer to one request. `response` is as far as it has come."""

    def __init__(
        self, server: ServerContext, body: ResponseRequest, started: StartedChat, response: ResponseObject
    ) -> None:
        self.response = response
        self._tokenizer = server.llm.tokenizer
        self._generation = started.generation
        self._reader = started.reader(server)
        self._items = OutputItems(with_logprobs=wants_logprobs(body))
        response.output = self._items.items
        self._top = (body.top_logprobs or 0) if wants_logprobs(body) else None
        self._names = TokenNames(server.llm.tokenizer, as_ids=False)
        self._num_events = 0
        self._num_tokens = 0

    async def events(self) -> AsyncGenerator[bytes]:
        """The events, one by one. What goes wrong is an event, too, and in the response."""
        try:
            yield self._state("created")
            if self.response.status == "queued":
                yield self._state("queued")
            has_begun = False
            async for _, output in self._generation.outputs():
                if not has_begun:
                    has_begun, self.response.status = True, "in_progress"
                    yield self._state("in_progress")
                for name, fields in self._news(output):
                    yield self._written(name, fields)
            yield self._state(_ENDINGS[self.response.status])
        except Exception as error:
            self.fail(as_api_error(error))
            yield self._state("failed")

    async def run(self) -> None:
        """The same without events. Raises ApiError and EngineError if the request fails."""
        async for _, output in self._generation.outputs():
            for _ in self._news(output):
                pass

    def _state(self, name: str) -> bytes:
        return self._written(f"response.{name}", {"response": self.response})

    def _written(self, name: str, fields: dict[str, Any]) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event(name, sequence_number=number, **fields)

    def fail(self, error: ApiError) -> None:
        """The response has failed."""
        code = "invalid_prompt" if error.status < 500 else "server_error"
        self.response.status = "failed"
        self.response.error = ResponseError(code, error.message, error.param)

    def _news(self, output: RequestOutput) -> Iterator[Event]:
        (answer,) = output.outputs
        self._num_tokens += len(answer.token_ids)
        is_end = answer.finish_reason is not None
        logprobs: list[TokenLogprob] = []
        if self._top is not None:
            logprobs = chat_logprobs(answer.logprobs or (), self._top, self._names)
        parts = self._reader.feed(answer.text, is_end=is_end)
        yield from self._items.news(parts, logprobs)
        if is_end:
            is_whole = answer.finish_reason == "stop"
            yield from self._items.end("completed" if is_whole else "incomplete")
            self._finish(answer.finish_reason, output.num_cached_tokens)

    def _finish(self, reason: str | None, cached: int) -> None:
        response = self.response
        response.completed_at = int(time.time())
        response.status = {"stop": "completed", "abort": "cancelled"}.get(reason or "", "incomplete")
        if response.status == "incomplete":
            response.incomplete_details = {"reason": "max_output_tokens"}
        num_prompt, num_tokens = self._generation.num_prompt_tokens, self._num_tokens
        response.usage = ResponseUsage(
            num_prompt,
            InputTokensDetails(cached),
            num_tokens,
            OutputTokensDetails(min(self._num_reasoning_tokens(), num_tokens)),
            num_prompt + num_tokens,
        )

    def _num_reasoning_tokens(self) -> int:
        """Counted from the text: pieces of an answer may hold the end of the reasoning and what follows it."""
        text = self._items.reasoning
        return len(self._tokenizer.encode(text, add_special_tokens=False)) if text and self._tokenizer else 0


_ENDINGS = {
    "completed": "completed",
    "incomplete": "incomplete",
    "cancelled": "incomplete",  # there is no event for it; the response says what it is
}
