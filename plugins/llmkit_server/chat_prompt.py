"""The prompt of a chat: the template applied to messages, tools and documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmkit.errors import InvalidRequestError
from llmkit.frontend.chat_template import ChatTemplate, missing_template
from llmkit_server.context import ServerContext
from llmkit_server.errors import ApiError, bad_request
from llmkit_server.limits import MAX_DOCUMENTS, MAX_MESSAGES, MAX_TEMPLATE_CHARS
from llmkit_server.protocol.base import ChatPromptFields

_LONG_CONVERSATION = 64
"""Conversations of more messages are rendered in a thread, as are those with a template of their own."""


async def chat_prompt(
    server: ServerContext, body: ChatPromptFields, tools: Sequence[Mapping[str, Any]] | None = None
) -> str:
    """The text that the model sees. Raises ApiError and InvalidRequestError naming the field."""
    _check_lists(body)
    template = await _template(server, body)
    continues = bool(body.continue_final_message)
    begins = (not continues) if body.add_generation_prompt is None else body.add_generation_prompt
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)

    truncates = getattr(body, "truncate_prompt_tokens", None)  # not of requests for token ids alone

    def render() -> str:
        with server.llm.input_processor.judging_length(body.messages, truncates):
            return template.render(
                body.messages,
                add_generation_prompt=begins,
                continue_final_message=continues,
                tools=tools,
                documents=body.documents,
                variables=variables,
            )

    if body.chat_template is None and len(body.messages) <= _LONG_CONVERSATION:
        return render()
    return await server.text_threads.run(render)


async def _template(server: ServerContext, body: ChatPromptFields) -> ChatTemplate:
    tokenizer = server.tokenizer
    if body.chat_template is not None:
        if not isinstance(body.chat_template, str) or not 0 < len(body.chat_template) <= MAX_TEMPLATE_CHARS:
            raise bad_request(
                f"chat_template must be a Jinja text of at most {MAX_TEMPLATE_CHARS} characters.", "chat_template"
            )
        template = ChatTemplate(body.chat_template, tokenizer.special_tokens, "chat_template")
        await server.text_threads.run(_compile, template)
        return template
    known = server.llm.input_processor.chat_template
    if known is None:
        raise missing_template()
    return known


def _compile(template: ChatTemplate) -> None:
    try:
        template.compile()
    except InvalidRequestError as error:
        raise bad_request(error.message, "chat_template") from error


def _check_lists(body: ChatPromptFields) -> None:
    if not isinstance(body.messages, list):
        raise bad_request("messages must be a list of messages.", "messages")
    if len(body.messages) > MAX_MESSAGES:
        raise bad_request(f"messages may hold at most {MAX_MESSAGES} messages, got {len(body.messages)}.", "messages")
    documents = body.documents
    if documents is not None:
        if not isinstance(documents, list) or not all(isinstance(document, dict) for document in documents):
            raise bad_request("documents must be a list of objects.", "documents")
        if len(documents) > MAX_DOCUMENTS:
            raise bad_request(f"documents may hold at most {MAX_DOCUMENTS}, got {len(documents)}.", "documents")
    if body.chat_template_kwargs is not None and not isinstance(body.chat_template_kwargs, dict):
        raise bad_request("chat_template_kwargs must be an object.", "chat_template_kwargs")
    if body.reasoning_effort is not None and not isinstance(body.reasoning_effort, str):
        raise bad_request("reasoning_effort must be a text.", "reasoning_effort")


def refuse_foreign_parts(value: Any, param: str) -> None:
    """Raises ApiError 501 for a field of OpenAI's API that nothing here can do."""
    if value is not None:
        raise ApiError(501, f"{param} is not supported.", param=param)
