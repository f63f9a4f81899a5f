"""/v1/responses."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from llmkit_server.body import read_body
from llmkit_server.context import context_of
from llmkit_server.errors import bad_request
from llmkit_server.openapi import describe
from llmkit_server.protocol.responses import DeletedResponse, ItemList, ResponseObject, ResponseRequest
from llmkit_server.responses.run import answer_response, event_stream, owner_of
from llmkit_server.responses.store import StoredResponse
from llmkit_server.streaming import json_response

router = APIRouter(prefix="/v1/responses", tags=["responses"])


def _find(request: Request, response_id: str) -> StoredResponse:
    server = context_of(request)
    return server.responses.find(response_id, owner_of(server, request))


@router.post("", openapi_extra=describe(ResponseRequest, ResponseObject, streams=True))
async def create_response(request: Request) -> Response:
    """The model's answer to a text, or to a conversation that the server may know already."""
    return await answer_response(context_of(request), request, await read_body(request, ResponseRequest))


@router.get("/{response_id}", openapi_extra=describe(response=ResponseObject, streams=True))
async def retrieve_response(
    request: Request, response_id: str, stream: bool = False, starting_after: Annotated[int, Query(ge=-1)] = -1
) -> Response:
    """A stored response, as far as it has come; with ?stream=true the events of a background run, those to come
    included, from the one after number `starting_after`."""
    stored = _find(request, response_id)
    if not stream:
        return json_response(stored.response)
    if stored.events is None:
        raise bad_request("Only a background response made with stream: true can be streamed.", "stream")
    return event_stream(stored, starting_after)


@router.delete("/{response_id}", openapi_extra=describe(response=DeletedResponse))
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget a response; if it still runs, it ends."""
    stored = _find(request, response_id)
    context_of(request).responses.remove(stored)
    await _end(stored)
    return json_response(DeletedResponse(response_id))


@router.post("/{response_id}/cancel", openapi_extra=describe(response=ResponseObject))
async def cancel_response(request: Request, response_id: str) -> Response:
    """End a response in the background; one that has ended stays as it is."""
    stored = _find(request, response_id)
    if not stored.response.background:
        raise bad_request("Only a response in the background can be cancelled.", "response_id")
    await _end(stored)
    return json_response(stored.response)


async def _end(stored: StoredResponse) -> None:
    if stored.task is not None and stored.cancel is not None:
        task = stored.task
        stored.cancel()
        await asyncio.wait({task})


@router.get("/{response_id}/input_items", openapi_extra=describe(response=ItemList))
async def list_input_items(
    request: Request,
    response_id: str,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """The items that a response was made of, those of earlier responses included, newest first. after: the id of the
    last item of the page before."""
    items = _find(request, response_id).items
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise bad_request("after is the id of none of the items.", "after")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return json_response(ItemList("list", page, first, last, len(ordered) > limit))
