"""Chat messages to prompt text, with the model's own Jinja template in a sandbox.

The environment is the one that templates are written for (Hugging Face `apply_chat_template`): blocks trimmed, the
globals `raise_exception` and `strftime_now`, the filter `tojson`, the tag `generation`. A template is somebody else's
program: it gets no attribute of Python objects that could lead out, no endless loop, and whatever it raises is
the request's error.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmkit.errors import InvalidRequestError
from llmkit.frontend.chat_messages import normalised_messages, with_final_content

if TYPE_CHECKING:
    from llmkit.frontend.template_sandbox import CompiledTemplate

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})


class ChatTemplate:
    """One template, compiled at its first use. Thread-safe.

    source: Jinja text. special_tokens: variables such as `bos_token`. name: for error messages.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], name: str = "the model's chat template") -> None:
        self._source = source
        self._variables = dict(special_tokens)
        self._name = name
        self._compiled: CompiledTemplate | None = None

    @property
    def source(self) -> str:
        """The Jinja text."""
        return self._source

    def compile(self) -> CompiledTemplate:
        """The compiled template. Raises InvalidRequestError naming the template and line of a syntax error."""
        if self._compiled is None:
            # Jinja takes a while to import and is needed for chats only.
            from llmkit.frontend.template_sandbox import compile_template

            self._compiled = compile_template(self._source, self._name)
        return self._compiled

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text.

        messages: mappings with `role` and `content` (text, text parts, or null). continue_final_message: the
        prompt ends right after the final message's content, so that the model goes on writing it.
        variables: further variables of the template (`chat_template_kwargs`).
        Raises InvalidRequestError: malformed messages, contradicting flags, whatever the template raises.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other: the first goes on with the "
                "last message, the second starts a new one.",
                param="continue_final_message",
            )
        reserved = sorted(_RESERVED & set(variables or ()))
        if reserved:
            raise InvalidRequestError(
                f"chat_template_kwargs may not set {', '.join(reserved)}.", param="chat_template_kwargs"
            )
        compiled = self.compile()
        chat = normalised_messages(messages, keep_parts=compiled.takes_parts)
        given = {
            **self._variables,
            **(variables or {}),
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        if continue_final_message:
            return self._render_unfinished(compiled, chat, given)
        return compiled.render({**given, "messages": chat})

    def _render_unfinished(self, compiled: CompiledTemplate, chat: list[dict[str, Any]], given: dict[str, Any]) -> str:
        """Mark the end of the final message and cut there. Its own text is no mark: it may occur twice, and a
        template may trim it."""
        mark = secrets.token_hex(12)
        text = compiled.render({**given, "messages": with_final_content(chat, mark)})
        end = text.rfind(mark)
        if end < 0:
            raise InvalidRequestError(
                f"{self._name} does not show the final message, so it cannot be continued.",
                param="continue_final_message",
            )
        return text[:end].replace(mark, "")


def missing_template() -> InvalidRequestError:
    """The error for a chat with a model that has no template: guessing one would give wrong answers."""
    return InvalidRequestError(
        "the model has no chat template.",
        param="messages",
        hint="Pass a plain prompt, or set model.chat_template (--chat-template) to a Jinja text or file.",
    )
