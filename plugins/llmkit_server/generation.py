"""The engine's side of one HTTP request: its prompts submitted, watched, merged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from llmkit import RequestOptions, RequestOutput, SamplingParams
from llmkit.errors import EngineOverloadedError, InvalidRequestError
from llmkit_server.context import ServerContext
from llmkit_server.errors import ApiError, ClientGone, as_api_error
from llmkit_server.sampling import named_for
from llmkit_server.streaming import EventStream, Watch, until_done
from llmkit_server.tracing import trace_headers

if TYPE_CHECKING:
    from llmkit.frontend.async_submission import Submission
    from llmkit.requests.grammar_task import GrammarTask


LONG_TEXT_CHARS = 32_768
"""Prompts of a request that have together as many characters are tokenised in a thread, so that nobody else waits."""

_TURN_S = 0.005
"""How long a request's prompts are submitted before everybody else on the event loop has a turn."""


class Generation:
    """Requests to the engine, one for each prompt, that one HTTP request has made. Made by `start`.

    id, created, model: as responses show them. names: fields of the engine's → the client's, for errors.
    """

    def __init__(
        self, server: ServerContext, request: Request, request_id: str, model: str, names: Mapping[str, str]
    ) -> None:
        self._server = server
        self._request = request
        self._names = names
        self._num_sequences = 0
        self.submissions: list[Submission] = []
        self.id = request_id
        self.created = int(time.time())
        self.model = model
        self.headers: dict[str, str] = {}

    async def start(
        self, prompts: Sequence[Any], params: SamplingParams, options: RequestOptions, *, waits: bool = True
    ) -> None:
        """Submit the prompts and wait until the engine has taken all of them, that is until nothing but an accident can
        end them; `finish` must follow. waits: otherwise what the engine refuses fails later.

        Raises ApiError, InvalidRequestError, EngineError, ClientGone; then nothing runs.
        """
        server = self._server
        server.check_ready()
        with named_for(self._names):
            server.admission.take(len(prompts), params.n)
        self._num_sequences = params.n * len(prompts)
        try:
            with named_for(self._names):
                await self._submit_all(prompts, params, options)
                if waits:
                    await self._accepted()
        except BaseException:
            self.finish()
            raise

    async def _accepted(self) -> None:
        with Watch(self._request.receive, self.abort) as watch:
            for submission in self.submissions:
                await submission.first()
        if watch.client_is_gone:
            raise ClientGone

    async def _submit_all(self, prompts: Sequence[Any], params: SamplingParams, options: RequestOptions) -> None:
        grammar = await self._server.llm.choose_grammar(params)
        options = replace(options, trace_headers=trace_headers(self._request.headers))
        turn_began = time.monotonic()
        for i, prompt in enumerate(prompts):
            if time.monotonic() - turn_began > _TURN_S:
                await asyncio.sleep(0)
                turn_began = time.monotonic()
            number = i if len(prompts) > 1 else None
            self._submit(prompt, params, options, number, grammar)

    def _submit(
        self,
        prompt: Any,
        params: SamplingParams,
        options: RequestOptions,
        number: int | None,
        grammar: GrammarTask | None,
    ) -> None:
        timeout = self._server.settings.request_timeout_s
        try:
            submission = self._server.llm.submit(prompt, params, options=options, timeout=timeout, grammar=grammar)
        except InvalidRequestError as error:
            if number is None or error.param != "prompt":
                raise
            raise InvalidRequestError(f"prompt[{number}]: {error.message}", param="prompt") from error
        self.submissions.append(submission)

    def abort(self) -> None:
        """End whatever still runs."""
        for submission in self.submissions:
            submission.abort()

    def finish(self) -> None:
        """Nothing of this is wanted any more; the room is given back."""
        self.abort()
        if self._num_sequences:
            self._server.admission.give_back(self._num_sequences)
            self._num_sequences = 0

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(submission.prompt_token_ids) for submission in self.submissions)

    async def whole(self) -> list[RequestOutput]:
        """The final output of each prompt. Raises ApiError if one has failed, ClientGone."""
        try:
            with Watch(self._request.receive, self.abort) as watch:
                results = [await self._final(submission) for submission in self.submissions]
            if watch.client_is_gone:
                raise ClientGone
            return results
        finally:
            self.finish()

    async def _final(self, submission: Submission) -> RequestOutput:
        final: RequestOutput | None = None
        async for output in submission:
            final = output
        assert final is not None
        self.check(final)
        return final

    def check(self, output: RequestOutput) -> None:
        """Raises ApiError if the request has failed."""
        if not any(answer.finish_reason == "error" for answer in output.outputs):
            return
        message = output.error or "The engine failed."
        if output.overloaded:
            raise as_api_error(EngineOverloadedError(message))
        if output.error_param is None:
            raise ApiError(500, message)
        raise ApiError(400, message, param=self._names.get(output.error_param, output.error_param))

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """News of all prompts as they come, each with the prompt's number. Raises ApiError if one has failed."""
        if len(self.submissions) == 1:
            async for output in self.submissions[0]:
                self.check(output)
                yield 0, output
            return
        async for number, output in _merged(self.submissions):
            self.check(output)
            yield number, output

    def stream(self, events: AsyncGenerator[bytes]) -> EventStream:
        """The response that sends `events`, and [DONE] behind them."""
        return self.stream_of(until_done(events))

    def stream_of(self, events: AsyncGenerator[bytes]) -> EventStream:
        """The response that sends `events`, which end by themselves and never raise."""
        return EventStream(events, gone=self.abort, finish=self.finish, headers=self.headers)


async def tokenised_if_long(server: ServerContext, prompts: Sequence[Any], options: RequestOptions) -> list[Any]:
    """`prompts`; if together they take long to tokenise, with their token ids. Those behind one that is too long stay
    as they are: that one ends the request."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if server.llm.tokenizer is None or sum(map(len, texts)) < LONG_TEXT_CHARS:
        return list(prompts)
    return await server.text_threads.run(_tokenised, server, prompts, options)


def _tokenised(server: ServerContext, prompts: Sequence[Any], options: RequestOptions) -> list[Any]:
    result = list(prompts)
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str) or not prompt:
            continue
        try:
            ids = server.llm.input_processor.encode(prompt, options)
        except InvalidRequestError:
            break
        result[i] = {"prompt": prompt, "prompt_token_ids": ids}
        if options.truncate_prompt_tokens is None and len(ids) > server.models.max_model_len:
            break
    return result


async def _merged(submissions: Sequence[Submission]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Outputs of several submissions in the order in which they come. One that its reader has not taken holds up its
    own submission only."""
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(len(submissions))

    async def read(number: int, submission: Submission) -> None:
        try:
            async for output in submission:
                await queue.put((number, output))
        except Exception as error:
            await queue.put((number, error))
        else:
            await queue.put((number, None))

    tasks = [asyncio.create_task(read(number, submission)) for number, submission in enumerate(submissions)]
    try:
        open_ones = len(tasks)
        while open_ones:
            number, item = await queue.get()
            if item is None:
                open_ones -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
