"""A request for a response: whole, as a stream, or in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmkit_server.chat import StartedChat, start_chat
from llmkit_server.context import ServerContext
from llmkit_server.errors import ClientGone, bad_request
from llmkit_server.protocol.responses import Item, ResponseRequest
from llmkit_server.responses.items import input_items, new_id
from llmkit_server.responses.request import chat_of, check_fields, client_names
from llmkit_server.responses.store import StoredResponse
from llmkit_server.responses.truncation import fitted
from llmkit_server.responses.writer import ResponseWriter, new_response
from llmkit_server.sampling import named_for
from llmkit_server.streaming import EventStream, Watch, json_response


def owner_of(server: ServerContext, request: Request) -> str | None:
    """Whose a response is: the key's. Without keys everybody is the same."""
    return request.scope["state"].get("client") if server.settings.api_keys else None


async def answer_response(server: ServerContext, request: Request, body: ResponseRequest) -> Response:
    """Runs a request. Raises what `Generation.start` does."""
    model = server.models.resolve(body.model)
    check_fields(body)
    owner = owner_of(server, request)
    items = [*_before(server, body, owner), *input_items(body.input)]
    names = client_names(body)
    chat = chat_of(body, items)
    if body.truncation == "auto":
        with named_for(names):
            chat = await fitted(server, chat)
    caller = Request(request.scope, _nobody) if body.background else request
    response_id = new_id("resp")  # by which anybody may fetch it: no client chooses it
    started = await start_chat(server, caller, chat, f"{response_id}-", names, waits=not body.background)
    response = new_response(response_id, model, body, started)
    writer = ResponseWriter(server, body, started, response)
    stored = StoredResponse(response, items, owner)
    if body.background:
        return _in_background(server, body, started, writer, stored)
    if body.streams:
        return started.generation.stream_of(_stored_at_end(server, writer, stored))
    return await _whole(server, request, started, writer, stored)


async def _nobody() -> Any:
    """What a server receives from a client who has sent everything and stays."""
    await asyncio.Event().wait()


def _before(server: ServerContext, body: ResponseRequest, owner: str | None) -> Sequence[Item]:
    """The conversation that is to go on."""
    if body.previous_response_id is None:
        return ()
    stored = server.responses.find(body.previous_response_id, owner, "previous_response_id")
    status = stored.response.status
    if status not in ("completed", "incomplete"):
        raise bad_request(f"The previous response is {status.replace('_', ' ')}.", "previous_response_id")
    return stored.conversation


async def _whole(
    server: ServerContext, request: Request, started: StartedChat, writer: ResponseWriter, stored: StoredResponse
) -> Response:
    generation = started.generation
    try:
        with Watch(request.receive, generation.abort) as watch:
            await writer.run()
        if watch.client_is_gone:
            raise ClientGone
    finally:
        generation.finish()
    _store(server, stored)
    return json_response(writer.response, generation.headers)


def _store(server: ServerContext, stored: StoredResponse) -> None:
    if stored.response.store:
        server.responses.add(stored)


async def _stored_at_end(
    server: ServerContext, writer: ResponseWriter, stored: StoredResponse
) -> AsyncGenerator[bytes]:
    """The events. The last one goes out when the response can be asked for; without that one it is not stored."""
    async for data in writer.events():
        if stored.response.status != "in_progress":
            _store(server, stored)
        yield data


def _in_background(
    server: ServerContext, body: ResponseRequest, started: StartedChat, writer: ResponseWriter, stored: StoredResponse
) -> Response:
    generation = started.generation
    stored.events = [] if body.streams else None
    stored.cancel = generation.abort

    async def work() -> None:
        try:
            async for data in writer.events():
                if stored.events is not None:
                    stored.events.append(data)
                stored.notify()
        finally:
            generation.finish()
            stored.task = stored.cancel = None
            stored.notify()
            server.responses.recount(stored)

    stored.task = asyncio.get_running_loop().create_task(work(), name=stored.response.id)
    server.responses.add(stored)
    if body.streams:
        return event_stream(stored, -1, generation.headers)
    return json_response(stored.response, generation.headers)


def event_stream(stored: StoredResponse, after: int, headers: dict[str, str] | None = None) -> EventStream:
    """Sends the events of a background run, which goes on whether or not anybody listens."""

    def nothing() -> None:
        return

    return EventStream(stored.stream(after), gone=nothing, finish=nothing, headers=headers)
