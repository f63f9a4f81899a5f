"""Embeddings: from the body to the engine, and from vectors to the response."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from llmkit import RequestOptions
from llmkit.errors import InvalidRequestError
from llmkit_server.body import unknown_fields_headers
from llmkit_server.completions import prompts_of
from llmkit_server.context import ServerContext
from llmkit_server.errors import ClientGone, bad_request
from llmkit_server.generation import tokenised_if_long
from llmkit_server.protocol.base import PromptTokensDetails
from llmkit_server.protocol.embeddings import EmbeddingRequest, EmbeddingUsage
from llmkit_server.sampling import named_for, request_id_of, request_options
from llmkit_server.streaming import Watch

if TYPE_CHECKING:
    from llmkit.requests.output import EmbeddingOutput

MAX_CONCURRENT = 256
"""Inputs of one request that are with the engine at a time: a batch may be larger than the queue."""

_NAMES = {"prompt": "input"}


class Embedder:
    """One request for embeddings."""

    def __init__(self, server: ServerContext, request: Request, body: EmbeddingRequest, prefix: str) -> None:
        self._server = server
        self._request = request
        self._body = body
        self.model = server.models.resolve(body.model)
        request_id = request_id_of(request, body)
        self.id = f"{prefix}{request_id}"
        self.created = int(time.time())
        self._prompts = prompts_of(body.input, "input")
        if body.encoding_format not in (None, "float", "base64"):
            raise bad_request("encoding_format must be float or base64.", "encoding_format")
        self.headers = unknown_fields_headers(body, request_id) | {"x-request-id": request_id}

    async def run(self) -> list[EmbeddingOutput]:
        """The embedding of each input. Raises ApiError, InvalidRequestError, EngineError, ClientGone; then nothing
        runs."""
        server = self._server
        server.check_ready()
        options = request_options(self._request, self._body, self.id, add_special_tokens=True)
        prompts = await tokenised_if_long(server, self._prompts, options)
        num_at_once = min(len(prompts), MAX_CONCURRENT, server.admission.capacity)
        with server.admission.enter(num_at_once), named_for(_NAMES):
            work = asyncio.ensure_future(self._all(prompts, options, num_at_once))

            def give_up() -> None:
                work.cancel()

            with Watch(self._request.receive, give_up) as watch:
                try:
                    return await work
                except asyncio.CancelledError:
                    work.cancel()
                    if watch.client_is_gone:
                        raise ClientGone from None
                    raise

    async def _all(self, prompts: Sequence[Any], options: RequestOptions, num_at_once: int) -> list[EmbeddingOutput]:
        results: dict[int, EmbeddingOutput] = {}
        pending = iter(enumerate(prompts))

        async def work() -> None:
            for number, prompt in pending:
                results[number] = await self._one(prompt, options, number if len(prompts) > 1 else None)

        tasks = [asyncio.create_task(work()) for _ in range(num_at_once)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [results[number] for number in range(len(prompts))]

    async def _one(self, prompt: Any, options: RequestOptions, number: int | None) -> EmbeddingOutput:
        body = self._body
        try:
            return await self._server.llm.embed(
                prompt,
                pooling="last" if body.pooling is None else body.pooling,
                normalize=body.normalize is not False,
                dimensions=body.dimensions,
                options=options,
                timeout=self._server.settings.request_timeout_s,
            )
        except InvalidRequestError as error:
            if number is None or error.param != "prompt":
                raise
            raise InvalidRequestError(f"input[{number}]: {error.message}", param="prompt") from error

    def written(self, output: EmbeddingOutput) -> list[float] | str:
        """The vector as the client wants it."""
        if self._body.encoding_format != "base64":
            return output.embedding
        vector = output.embedding
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def usage_of(outputs: Sequence[EmbeddingOutput]) -> EmbeddingUsage:
    total = sum(output.num_prompt_tokens for output in outputs)
    return EmbeddingUsage(total, total, PromptTokensDetails(sum(output.num_cached_tokens for output in outputs)))
