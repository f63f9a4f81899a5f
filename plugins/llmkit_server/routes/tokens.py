"""/tokenize and /detokenize."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from llmkit_server.body import read_body
from llmkit_server.chat_prompt import chat_prompt
from llmkit_server.context import ServerContext, context_of
from llmkit_server.errors import bad_request
from llmkit_server.generation import LONG_TEXT_CHARS
from llmkit_server.limits import MAX_DETOKENIZE_IDS, MAX_TOKENIZE_CHARS
from llmkit_server.openapi import describe
from llmkit_server.protocol.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from llmkit_server.streaming import json_response

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", openapi_extra=describe(TokenizeRequest, TokenizeResponse))
async def tokenize(request: Request) -> Response:
    """The token ids of a text, or of a conversation's prompt."""
    server = context_of(request)
    body = await read_body(request, TokenizeRequest)
    server.models.resolve(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Exactly one of prompt and messages is needed.", "prompt")
    text = await chat_prompt(server, body, body.tools) if body.prompt is None else body.prompt
    if len(text) > MAX_TOKENIZE_CHARS:
        raise bad_request(f"messages may make a prompt of at most {MAX_TOKENIZE_CHARS} characters.", "messages")
    adds = (body.prompt is not None) if body.add_special_tokens is None else body.add_special_tokens
    ids = await _encode(server, text, adds)
    strings = [server.tokenizer.token_text(token_id) for token_id in ids] if body.return_token_strs else None
    return json_response(TokenizeResponse(len(ids), server.models.max_model_len, ids, strings))


async def _encode(server: ServerContext, text: str, adds_special_tokens: bool) -> list[int]:
    encode = server.tokenizer.encode
    if len(text) < LONG_TEXT_CHARS:
        return encode(text, add_special_tokens=adds_special_tokens)
    return await server.text_threads.run(encode, text, add_special_tokens=adds_special_tokens)


@router.post("/detokenize", openapi_extra=describe(DetokenizeRequest, DetokenizeResponse))
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    server = context_of(request)
    body = await read_body(request, DetokenizeRequest)
    server.models.resolve(body.model)
    ids = body.tokens
    if not isinstance(ids, list) or not all(type(token_id) is int for token_id in ids):
        raise bad_request("tokens must be a list of token ids.", "tokens")
    if len(ids) > MAX_DETOKENIZE_IDS:
        raise bad_request(f"tokens may hold at most {MAX_DETOKENIZE_IDS} ids, got {len(ids)}.", "tokens")
    size = server.tokenizer.vocab_size
    if ids and not (min(ids) >= 0 and max(ids) < size):
        raise bad_request(f"tokens must be ids from 0 to {size - 1}.", "tokens")
    text = await server.text_threads.run(server.tokenizer.decode, ids, skip_special_tokens=False)
    return json_response(DetokenizeResponse(text))
