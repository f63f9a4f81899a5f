"""A prompt and its parameters to a request that the engine can run. Everything that can be checked is checked here:
what passes does not fail later for a reason that was visible at the door."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from llmkit.errors import InvalidRequestError, shown
from llmkit.frontend.chat_messages import TemplateLimitError, text_length
from llmkit.frontend.chat_template import ChatTemplate, missing_template
from llmkit.frontend.prompts import ParsedPrompt, RequestOptions, parse_prompt, refused
from llmkit.frontend.tokenizer import Tokenizer
from llmkit.frontend.transfer_params import checked_transfer_params
from llmkit.grammars.constraints import grammar_request
from llmkit.requests.grammar_task import GrammarTask
from llmkit.requests.message import EngineRequest
from llmkit.requests.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from llmkit.frontend.embedding import EmbeddingParams
    from llmkit.grammars.backends import GrammarBackends

MAX_REQUEST_ID_CHARS = 256

SHORT_TOKEN_CHARS = 8
"""Texts of no more characters for each token that they may have are tokenised whatever the vocabulary is."""

_SCORING = SamplingParams(max_tokens=0, prompt_logprobs=0, seed=0, detokenize=False, output_kind=OutputKind.FINAL_ONLY)
"""Samples nothing."""


@dataclass(frozen=True)
class ModelLimits:
    """What the checks need to know of the model and the engine, in tokens. eos_token_ids end every answer.
    hidden_size: numbers of an embedding; None: not known before there is one."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int = 20
    eos_token_ids: frozenset[int] = frozenset()
    hidden_size: int | None = None


@dataclass(frozen=True)
class PreparedRequest:
    """A request for the engine, and what its outputs will show: the user's id for it and the prompt's text.

    trace_headers: as of RequestOptions."""

    engine_request: EngineRequest
    request_id: str
    prompt: str | None
    trace_headers: Mapping[str, str] | None = None


class InputProcessor:
    """Prepares requests for one model. Holds no state per request; thread-safe.

    tokenizer: None if the model has none: then prompts are token ids, and stop strings and bad words are refused.
    chat_template: None if the model has none: then chats are refused. grammars: chooses the grammar engine of a request
    with structured_outputs; None: such requests are refused. max_whitespace: see StructuredConfig.
    """

    def __init__(
        self,
        limits: ModelLimits,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        grammars: GrammarBackends | None = None,
        max_whitespace: int = 32,
    ) -> None:
        self.limits = limits
        self._grammars = grammars
        self._max_whitespace = max_whitespace
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._numbers = itertools.count()
        self._known_bad_words = lru_cache(maxsize=16)(self._bad_words_ids)

    def prepare(
        self,
        prompt: Any,
        params: SamplingParams,
        options: RequestOptions | None = None,
        *,
        chat_arguments: Mapping[str, Any] | None = None,
        grammar: GrammarTask | None = None,
    ) -> PreparedRequest:
        """`prompt`: text, token ids or a mapping (see `prompts.Prompt`). `chat_arguments`: keyword arguments of
        `ChatTemplate.render` for a prompt with messages. grammar: `grammar_task(params)`, if it is known already.

        A max_tokens beyond the room that the prompt leaves is clipped to it. A missing seed is drawn from the
        operating system's entropy. Raises InvalidRequestError naming the field.
        """
        options = _checked_options(options)
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}.", param="sampling_params"
            )
        params = params.with_values()  # the dictionaries in the caller's may be changed later, and may have been
        self._check_params(params)
        parsed = parse_prompt(prompt)
        text, token_ids = self._tokenise(parsed, options, chat_arguments or {})
        token_ids = self._truncate(token_ids, options.truncate_prompt_tokens, params)
        max_tokens = self._room(token_ids, params)
        request_id, internal_id = self._ids(options.request_id)
        eos = frozenset() if params.ignore_eos else self.limits.eos_token_ids
        stop_token_ids = eos | frozenset(params.stop_ids)
        _check_some_are_left(params, stop_token_ids)
        request = EngineRequest(
            request_id=internal_id,
            prompt_token_ids=token_ids,
            sampling_params=self._resolved(params),
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            eos_token_ids=eos,
            bad_words_ids=self.bad_words_ids(params.bad_word_strings),
            arrival_time=time.monotonic(),
            priority=_checked_priority(options.priority),
            user=_checked_text(options.user, "user"),
            cache_salt=_checked_text(
                options.cache_salt if parsed.cache_salt is None else parsed.cache_salt, "cache_salt"
            ),
            kv_transfer_params=checked_transfer_params(options.kv_transfer_params),
            grammar=(grammar or self.grammar_task(params)) if max_tokens > 0 else None,
        )
        return PreparedRequest(request, request_id, text, options.trace_headers)

    def prepare_embedding(
        self, prompt: Any, params: EmbeddingParams, options: RequestOptions | None = None
    ) -> PreparedRequest:
        """`prepare` for a prompt that is to be embedded. Raises InvalidRequestError naming the field."""
        params.check(self.limits.hidden_size)
        prepared = self.prepare(prompt, _SCORING, options)
        sampling = prepared.engine_request.sampling_params.with_values(prompt_logprobs=None, max_tokens=1)
        request = msgspec.structs.replace(
            prepared.engine_request, sampling_params=sampling, pooling=params.pooling, max_tokens=0
        )
        return replace(prepared, engine_request=request)

    def _resolved(self, params: SamplingParams) -> SamplingParams:
        """A seed where there is none, and the vocabulary's size for -1 log-probabilities. Without the constraint, which
        the request has as its grammar: a message cannot hold every number of a schema."""
        changes: dict[str, Any] = {"structured_outputs": None}
        if params.seed is None:
            changes["seed"] = secrets.randbits(63)
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(params, field) == -1:
                changes[field] = self.limits.vocab_size
        return params.with_values(**changes)

    def _check_params(self, params: SamplingParams) -> None:
        for field in ("logprobs", "prompt_logprobs"):
            self._check_logprobs(field, getattr(params, field))
        self._check_vocabulary("logit_bias", params.logit_bias or ())
        self._check_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
        self._check_vocabulary("stop_token_ids", params.stop_ids)
        if self.tokenizer is None:
            for field in ("stop", "bad_words"):
                if getattr(params, field):
                    raise InvalidRequestError(f"{field} needs a tokenizer, and this model has none.", param=field)

    def grammar_task(self, params: SamplingParams) -> GrammarTask | None:
        """What constrains the text, and the engines that can; None if nothing does. A large grammar takes seconds to be
        read. Raises InvalidRequestError for one that is malformed or that no engine can express."""
        if params.constraint is None:
            return None
        if self._grammars is None:
            raise InvalidRequestError(
                "structured_outputs needs a tokenizer, and this model has none.", param="structured_outputs"
            )
        request = grammar_request(params.constraint, self._grammars.vocabulary, self._max_whitespace)
        return self._grammars.choose(request)

    def _check_logprobs(self, field: str, asked: int | None) -> None:
        if asked is None:
            return
        number = self.limits.vocab_size if asked == -1 else asked
        if number > self.limits.max_logprobs:
            what = f"-1 (the whole vocabulary of {number})" if asked == -1 else shown(number)
            raise InvalidRequestError(
                f"{field} must be at most {self.limits.max_logprobs}, got {what}.",
                param=field,
                hint="execution.max_logprobs (--max-logprobs) raises the limit.",
            )
        if number > self.limits.vocab_size:
            raise InvalidRequestError(
                f"{field} must be at most the vocabulary of {self.limits.vocab_size}, got {number}.", param=field
            )

    def _check_vocabulary(self, field: str, token_ids: Collection[int]) -> None:
        size = self.limits.vocab_size
        if not _all_below(size, token_ids):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < size)
            raise InvalidRequestError(
                f"{field} holds token id {shown(wrong)}; the model's ids are 0 to {size - 1}.",
                param=field,
            )

    def _tokenise(
        self, parsed: ParsedPrompt, options: RequestOptions, chat_arguments: Mapping[str, Any]
    ) -> tuple[str | None, list[int]]:
        if parsed.token_ids is not None:
            if not parsed.token_ids:
                raise refused("the prompt is empty: it needs at least one token.")
            self._check_vocabulary("prompt", parsed.token_ids)
            return parsed.text, parsed.token_ids
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise refused("the model has no tokenizer: pass the prompt as token ids.")
        if parsed.messages is not None:
            if self.chat_template is None:
                raise missing_template()
            with self.judging_length(parsed.messages, options.truncate_prompt_tokens):
                text = self.chat_template.render(parsed.messages, **chat_arguments)
            token_ids = self.encode(text, replace(options, add_special_tokens=False))
        else:
            text = parsed.text or ""
            if not text:
                raise refused("the prompt is empty.")
            token_ids = self.encode(text, options)
        if not token_ids:
            raise refused("the prompt has no tokens: the model's vocabulary holds none of its characters.")
        self._check_vocabulary("prompt", token_ids)
        return text, token_ids

    def encode(self, text: str, options: RequestOptions) -> list[int]:
        """Token ids of a prompt's text, not truncated yet. Raises InvalidRequestError for one that has more characters
        than the longest sequence can have, before time and memory are spent on its tokens."""
        assert self.tokenizer is not None
        self._check_characters("the prompt has", len(text), options.truncate_prompt_tokens)
        return self.tokenizer.encode(text, add_special_tokens=options.add_special_tokens)

    @contextlib.contextmanager
    def judging_length(self, messages: Any, truncate_prompt_tokens: Any) -> Iterator[None]:
        """Around the rendering of messages: where a chat template exceeds what one may do and the messages are longer
        than the longest sequence, their length is the error. Without that error it is the template that decides how
        much of them the model sees."""
        try:
            yield
        except TemplateLimitError:
            if self.tokenizer is not None:
                self._check_characters("the messages have", text_length(messages), truncate_prompt_tokens)
            raise

    def _check_characters(self, whose: str, count: int, truncate_prompt_tokens: Any) -> None:
        """Raises InvalidRequestError if `count` characters are more than the longest sequence can have."""
        limit = self.limits.max_model_len
        if count > SHORT_TOKEN_CHARS * limit and truncate_prompt_tokens is None:
            longest = limit * self._longest_token
            if count > longest:
                raise refused(
                    f"{whose} {count} characters; the longest sequence of {limit} tokens (max_model_len) "
                    f"holds at most {longest}."
                )

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of the longest token."""
        tokenizer = self.tokenizer
        assert tokenizer is not None
        return max((len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size)), default=1)

    def _truncate(self, token_ids: list[int], limit: int | None, params: SamplingParams) -> list[int]:
        if limit is None:
            return token_ids
        longest = self._longest_prompt(params)
        if isinstance(limit, bool) or not isinstance(limit, int) or not (limit == -1 or 1 <= limit <= longest):
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be -1 or an integer from 1 to {longest}, got {shown(limit)}.",
                param="truncate_prompt_tokens",
            )
        return token_ids[-(longest if limit == -1 else limit) :]

    def _longest_prompt(self, params: SamplingParams) -> int:
        return self.limits.max_model_len - (0 if params.max_tokens == 0 else 1)

    def _room(self, token_ids: list[int], params: SamplingParams) -> int:
        """How many tokens may be generated: as asked, at most what the context has left."""
        length, limit = len(token_ids), self.limits.max_model_len
        if length > limit:
            raise refused(f"the prompt has {length} tokens; the longest sequence is {limit} (max_model_len).")
        if length > self._longest_prompt(params):
            raise refused(
                f"the prompt has {length} tokens and at least 1 is to be generated; together they exceed the longest "
                f"sequence of {limit} (max_model_len)."
            )
        room = limit - length
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def bad_words_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that must not appear: every word as it stands and, unless it begins with a space,
        with one before it, whatever the number of tokens. Words that the vocabulary cannot write ban nothing: they
        never appear, and what is left of them may be harmless."""
        return self._known_bad_words(tuple(words))

    def _bad_words_ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        forms = [form for word in words for form in ((word,) if word[0].isspace() else (word, " " + word))]
        return tuple(dict.fromkeys(ids for form in forms if (ids := self._exact_ids(form))))

    def _exact_ids(self, text: str) -> tuple[int, ...]:
        """The tokens of `text`; none if they lose some of it."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return ()
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        if tokenizer.byte_level and b"".join(map(tokenizer.token_bytes, ids)) != text.encode():
            return ()
        return ids if max(ids, default=self.limits.vocab_size) < self.limits.vocab_size else ()

    def _ids(self, request_id: str | None) -> tuple[str, str]:
        """The user's id and the engine's. The latter is unique whatever users choose, so that equal ids cannot
        mix up answers, and an abort never hits a later request of the same name."""
        number = next(self._numbers)
        if request_id is None:
            return f"request-{number}", f"request-{number}"
        if not isinstance(request_id, str) or not request_id or not request_id.isprintable():
            raise InvalidRequestError(
                "request_id must be a text of printable characters, not empty.", param="request_id"
            )
        if len(request_id) > MAX_REQUEST_ID_CHARS:
            raise InvalidRequestError(
                f"request_id must have at most {MAX_REQUEST_ID_CHARS} characters, got {len(request_id)}.",
                param="request_id",
            )
        return request_id, f"{request_id}#{number}"


def _checked_options(options: Any) -> RequestOptions:
    if options is None:
        return RequestOptions()
    if not isinstance(options, RequestOptions):
        raise InvalidRequestError(f"options must be RequestOptions, got {type(options).__name__}.", param="options")
    if not isinstance(options.add_special_tokens, bool):
        raise InvalidRequestError(
            f"add_special_tokens must be true or false, got {shown(options.add_special_tokens)}.",
            param="add_special_tokens",
        )
    return options


def _check_some_are_left(params: SamplingParams, stop_token_ids: frozenset[int]) -> None:
    """Tokens that may come first: until there are min_tokens, none that ends the answer."""
    allowed = params.allowed_token_ids
    if params.min_tokens and allowed is not None and stop_token_ids.issuperset(allowed):
        raise InvalidRequestError(
            "allowed_token_ids has none but tokens that end the answer, which min_tokens forbids.",
            param="allowed_token_ids",
        )


def _checked_priority(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**31) <= value < 2**31:
        raise InvalidRequestError(f"priority must be a 32-bit integer, got {shown(value)}.", param="priority")
    return value


def _checked_text(value: Any, field: str) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise InvalidRequestError(f"{field} must be a text, not empty, or null.", param=field)
    return value


def _all_below(limit: int, numbers: Iterable[int]) -> bool:
    """Whether all are from 0 to limit - 1; takes a third of the time that comparing one by one takes."""
    try:
        held = array("I", numbers)
    except OverflowError:
        return False
    return not held or int(np.frombuffer(held, dtype=np.uintc).max()) < limit
