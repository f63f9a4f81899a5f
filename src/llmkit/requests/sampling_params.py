"""What a request asks for: how to sample, when to stop, what to return."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, cast

import msgspec

from llmkit.errors import InvalidRequestError
from llmkit.requests import validation
from llmkit.requests.structured_outputs import StructuredOutputs, structured_outputs

MIN_TEMPERATURE = 0.01
"""Temperatures above 0 and below this are raised to it: smaller ones overflow the scaled logits."""

MAX_N = 16384
MAX_STOP_STRINGS = 256
MAX_STOP_CHARS = 4096
MAX_STOP_TOTAL_CHARS = 16_384
MAX_STOP_TOKEN_IDS = 4096
MAX_BAD_WORDS = 4096
MAX_BAD_WORDS_TOTAL_CHARS = 65_536
MAX_LOGIT_BIAS = 65_536
MAX_ALLOWED_TOKEN_IDS = 2**20
MAX_TOP_K = 2**31 - 1
MAX_LOGPROBS = 2**31 - 1
MAX_TOKENS = 2**31 - 1


class OutputKind(Enum):
    """What each RequestOutput of a stream holds: everything so far, only the news, or one at the end."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to answer one prompt. Everything that can be checked without the model is checked on construction.

    n: number of answers to the prompt (1..16384), with different seeds.
    presence_penalty, frequency_penalty: -2..2, over the answer so far.
    repetition_penalty: above 0, over prompt and answer.
    temperature: 0..2; 0 is greedy, values between 0 and 0.01 become 0.01.
    top_p: above 0, up to 1. top_k: 0 and -1 are off, -1 becomes 0.
    min_p: 0..1, share of the best token's probability that a token must reach.
    seed: any signed 64-bit number; None: the engine draws one.
    stop: string or strings that end the answer. stop_token_ids: token ids that do.
    ignore_eos: end-of-sequence tokens do not end it.
    max_tokens: longest answer; None: the rest of the context; 0: only with prompt_logprobs (scoring).
    min_tokens: nothing but the context's end stops the answer before this length.
    logprobs, prompt_logprobs: None: none; k >= 0: the token's own and the k best; -1: the whole vocabulary.
    detokenize, skip_special_tokens, spaces_between_special_tokens: how ids become text.
    include_stop_str_in_output: keep the stop string in the text. output_kind: what a stream yields.
    bad_words: text or texts that must not appear. logit_bias: token id → -100..100, added to its logit.
    allowed_token_ids: nothing else is sampled.
    structured_outputs: a StructuredOutputs or a mapping of its fields: exactly one constraint on the text.
    extra_args: for plugins; the core does not look inside.

    Raises InvalidRequestError whose `param` is the offending field.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: OutputKind = OutputKind.CUMULATIVE
    bad_words: str | Sequence[str] | None = ()
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: Any = None
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        set_field = msgspec.structs.force_setattr
        for name, value in (
            _checked_numbers(self) | _checked_flags(self) | _checked_lists(self) | _checked_objects(self)
        ).items():
            set_field(self, name, value)
        _check_together(self)

    def with_values(self, **changes: Any) -> SamplingParams:
        """A copy with other values, which are valid and in the form that construction gives them. Nothing is checked
        again, which takes ten times as long, but where something could have been changed since: it is copied, too."""
        if any(value is not None for value in (self.logit_bias, self.extra_args, self.structured_outputs)):
            return msgspec.structs.replace(self, **changes)
        copied = copy.copy(self)
        for name, value in changes.items():
            msgspec.structs.force_setattr(copied, name, value)
        return copied

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken without drawing."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as construction has normalised it."""
        return cast("tuple[str, ...]", self.stop)

    @property
    def bad_word_strings(self) -> tuple[str, ...]:
        """`bad_words` as construction has normalised it."""
        return cast("tuple[str, ...]", self.bad_words)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as construction has normalised it."""
        return cast("tuple[int, ...]", self.stop_token_ids)

    @property
    def constraint(self) -> StructuredOutputs | None:
        """`structured_outputs` as construction has normalised it."""
        return cast("StructuredOutputs | None", self.structured_outputs)


_MAX_TOKENS_RANGE = f"an integer from 1 to {MAX_TOKENS} (0 only with prompt_logprobs, to score a prompt)"


def _checked_numbers(params: SamplingParams) -> dict[str, Any]:
    integer, number = validation.integer, validation.number
    temperature = number("temperature", params.temperature, "a number from 0 to 2", 0.0, 2.0)
    if 0.0 < temperature < MIN_TEMPERATURE:
        temperature = MIN_TEMPERATURE
    optional: dict[str, tuple[Any, ...]] = {
        "seed": (-(2**63), 2**63 - 1),
        "max_tokens": (0, MAX_TOKENS, _MAX_TOKENS_RANGE),
        "logprobs": (-1, MAX_LOGPROBS),
        "prompt_logprobs": (-1, MAX_LOGPROBS),
    }
    penalties = {
        name: number(name, getattr(params, name), "a number from -2 to 2", -2.0, 2.0)
        for name in ("presence_penalty", "frequency_penalty")
    }
    return (
        {
            "n": integer("n", params.n, 1, MAX_N),
            "repetition_penalty": number(
                "repetition_penalty", params.repetition_penalty, "a number above 0", 0.0, 1e6, open_low=True
            ),
            "temperature": temperature,
            "top_p": number("top_p", params.top_p, "a number above 0 and at most 1", 0.0, 1.0, open_low=True),
            "top_k": max(0, integer("top_k", params.top_k, -1, MAX_TOP_K)),
            "min_p": number("min_p", params.min_p, "a number from 0 to 1", 0.0, 1.0),
            "min_tokens": integer("min_tokens", params.min_tokens, 0, MAX_TOKENS),
        }
        | penalties
        | {
            name: None if getattr(params, name) is None else integer(name, getattr(params, name), *bounds)
            for name, bounds in optional.items()
        }
    )


def _checked_flags(params: SamplingParams) -> dict[str, Any]:
    names = (
        "ignore_eos",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
    )
    return {name: validation.flag(name, getattr(params, name)) for name in names}


def _checked_lists(params: SamplingParams) -> dict[str, Any]:
    allowed = params.allowed_token_ids
    if allowed is not None:
        allowed = validation.token_ids("allowed_token_ids", allowed, MAX_ALLOWED_TOKEN_IDS)
        if not allowed:
            raise InvalidRequestError("allowed_token_ids must not be empty.", param="allowed_token_ids")
    return {
        "stop": validation.strings("stop", params.stop, MAX_STOP_STRINGS, MAX_STOP_CHARS, MAX_STOP_TOTAL_CHARS),
        "stop_token_ids": validation.token_ids("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS),
        "bad_words": validation.strings(
            "bad_words", params.bad_words, MAX_BAD_WORDS, MAX_STOP_CHARS, MAX_BAD_WORDS_TOTAL_CHARS
        ),
        "logit_bias": validation.logit_bias("logit_bias", params.logit_bias, MAX_LOGIT_BIAS),
        "allowed_token_ids": allowed,
    }


def _checked_objects(params: SamplingParams) -> dict[str, Any]:
    try:
        kind = OutputKind(params.output_kind)
    except Exception:  # ValueError, or what the value's own repr raises, which ValueError shows
        words = ", ".join(kind.value for kind in OutputKind)
        raise validation.refuse("output_kind", params.output_kind, f"one of {words}") from None
    extra = params.extra_args
    if extra is not None and not (isinstance(extra, Mapping) and all(isinstance(key, str) for key in extra)):
        raise validation.refuse("extra_args", extra, "a mapping with text keys")
    return {"output_kind": kind, "structured_outputs": structured_outputs(params.structured_outputs)}


def _check_together(params: SamplingParams) -> None:
    max_tokens = params.max_tokens
    if max_tokens == 0 and params.prompt_logprobs is None:
        raise validation.refuse("max_tokens", max_tokens, _MAX_TOKENS_RANGE)
    if max_tokens is not None and params.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens must be at most max_tokens ({max_tokens}), got {params.min_tokens}.",
            param="min_tokens",
        )
    if params.stop and not params.detokenize:
        raise InvalidRequestError("stop needs detokenize=True: stop strings are found in the text.", param="stop")
