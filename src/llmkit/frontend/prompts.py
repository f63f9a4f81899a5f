"""The forms that a prompt may come in, brought to one."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from llmkit.errors import InvalidRequestError, described

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with one of `prompt`, `prompt_token_ids`, `messages`, and maybe `cache_salt`."""

MAX_PROMPT_TOKENS = 2**24
"""No context is longer; what goes on beyond is an endless iterator."""

_SOURCES = ("prompt", "prompt_token_ids", "messages")
_KEYS = (*_SOURCES, "cache_salt")


@dataclass(frozen=True)
class RequestOptions:
    """What a request may carry besides its prompt and sampling parameters.

    request_id: name of the request in its outputs; one is made up if None. Need not be unique.
    priority: lower is sooner (for schedulers that look at it). user: key for fairness between users.
    cache_salt: the prefix cache is shared only among requests with the same salt.
    truncate_prompt_tokens: keep only that many tokens, the last ones; -1: as many as the context takes.
    add_special_tokens: whether the tokenizer adds its own to a text prompt (BOS); chats never get them twice.
    kv_transfer_params: for the connector, a JSON object; refused if there is none.
    trace_headers: `traceparent` and its companions, of the trace that the request belongs to.
    """

    request_id: str | None = None
    priority: int = 0
    user: str | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool = True
    kv_transfer_params: Mapping[str, Any] | None = None
    trace_headers: Mapping[str, str] | None = None


def options_each(options: Any, count: int, **fields: Any) -> list[Any]:
    """Options for each of `count` prompts, given as one for all or one each. Likewise `fields`: those that are not None
    replace the options' fields of the same name.

    Raises InvalidRequestError if there are not as many as prompts, or if options and a field say different things.
    """
    each = list(one_each("options", options, count))
    for name, value in fields.items():
        if value is None:
            continue
        for i, one in enumerate(one_each(name, value, count)):
            before = each[i] if each[i] is not None else RequestOptions()
            if not isinstance(before, RequestOptions):
                continue  # refused with the prompt it belongs to
            if not _agree(getattr(before, name), getattr(RequestOptions, name), one):
                raise InvalidRequestError(f"{name} and options say different things about the {name}.", param=name)
            each[i] = replace(before, **{name: one})
    return each


def _agree(value: Any, unset: Any, other: Any) -> bool:
    """Whether `value` is not set, or the same as `other`. Either may be anything: arrays have no single answer."""
    plain = (str, int, type(None))
    return isinstance(value, plain) and (value == unset or (isinstance(other, plain) and value == other))


def one_each(name: str, value: Any, count: int) -> Sequence[Any]:
    """`value` for each of `count` prompts, if it is a list one of its elements each. Raises InvalidRequestError."""
    if isinstance(value, (list, tuple)):
        if len(value) != count:
            message = f"{name} must be one, or as many as prompts ({count}); got {len(value)}."
            raise InvalidRequestError(message, param=name)
        return value
    return [value] * count


@dataclass(frozen=True)
class ParsedPrompt:
    """One prompt; exactly one of text, token_ids and messages is set."""

    text: str | None = None
    token_ids: list[int] | None = None
    messages: Sequence[Message] | None = None
    cache_salt: str | None = None


def refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="prompt")


def is_one_prompt(prompts: Any) -> bool:
    """Whether `prompts` is a single prompt, not several."""
    if isinstance(prompts, (str, Mapping)):
        return True
    return isinstance(prompts, Sequence) and len(prompts) > 0 and _is_integer(prompts[0])


def is_conversation(prompt: Any) -> bool:
    """Whether `prompt` is one chat: a list of messages."""
    if isinstance(prompt, (str, Mapping)) or not isinstance(prompt, Sequence) or not prompt:
        return False
    return isinstance(prompt[0], Mapping) and "role" in prompt[0]


def parse_prompt(prompt: Any) -> ParsedPrompt:
    """One prompt in its one form. Raises InvalidRequestError (param "prompt") for anything else."""
    if isinstance(prompt, str):
        return ParsedPrompt(text=prompt)
    if isinstance(prompt, Mapping):
        return _from_mapping(prompt)
    if isinstance(prompt, (bytes, bytearray)) or not hasattr(prompt, "__iter__"):
        raise refused(f"a prompt must be text, token ids or a mapping, got {type(prompt).__name__}.")
    return ParsedPrompt(token_ids=_token_ids(prompt))


def _from_mapping(prompt: Mapping[str, Any]) -> ParsedPrompt:
    unknown = [str(key) for key in prompt if key not in _KEYS]
    if unknown:
        raise refused(f"a prompt has no key {', '.join(unknown)}; known: {', '.join(_KEYS)}.")
    # A text may stand beside its token ids, as a reminder of where they came from; the ids count.
    given = [key for key in _SOURCES if prompt.get(key) is not None]
    if given == ["prompt", "prompt_token_ids"]:
        given = ["prompt_token_ids"]
    if len(given) != 1:
        raise refused(f"a prompt needs exactly one of {', '.join(_SOURCES)}; got {', '.join(given) or 'none'}.")
    salt = prompt.get("cache_salt")
    if given == ["messages"]:
        return ParsedPrompt(messages=prompt["messages"], cache_salt=salt)
    text = prompt.get("prompt")
    if text is not None and not isinstance(text, str):
        raise refused(f"prompt must be text, got {type(text).__name__}.")
    ids = _token_ids(prompt["prompt_token_ids"]) if given == ["prompt_token_ids"] else None
    return ParsedPrompt(text=text, token_ids=ids, cache_salt=salt)


def _token_ids(values: Any) -> list[int]:
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__iter__"):
        raise refused(f"token ids must be a list of integers, got {type(values).__name__}.")
    try:
        ids = values[: MAX_PROMPT_TOKENS + 1] if type(values) is list else list(islice(values, MAX_PROMPT_TOKENS + 1))
    except Exception as error:  # an iterator's own
        raise refused(f"token ids must be a list of integers; reading them failed with {described(error)}.") from error
    if len(ids) > MAX_PROMPT_TOKENS:
        raise refused(f"a prompt may have at most {MAX_PROMPT_TOKENS} tokens.")
    if set(map(id, map(type, ids))) <= {id(int)}:  # nothing in Python per token
        return ids
    for token_id in ids:
        if not _is_integer(token_id):
            raise refused(f"token ids must be integers, got {type(token_id).__name__}.")
    return [operator.index(token_id) for token_id in ids]


def _is_integer(value: Any) -> bool:
    """Whether `value` is one number; an array has `__index__` too, whatever it holds."""
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except Exception:  # TypeError, or whatever the value's own method raises
        return False
    return getattr(value, "ndim", 0) == 0
