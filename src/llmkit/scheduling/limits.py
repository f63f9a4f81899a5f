"""The scheduler's limits, and which requests they let in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmkit.errors import ConfigError, InvalidRequestError
from llmkit.requests.message import EngineRequest

if TYPE_CHECKING:
    from llmkit.config import EngineConfig
    from llmkit.kv_cache.manager import KVCacheManager


@dataclass(frozen=True, slots=True)
class Limits:
    """max_num_batched_tokens: tokens of a step. max_num_seqs: sequences that run at once. max_model_len: tokens of
    a sequence. pool_tokens: tokens that the KV cache can hold of one sequence. chunked_prefill: whether a
    prompt may be spread over steps."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    pool_tokens: int
    chunked_prefill: bool

    @classmethod
    def of(cls, config: EngineConfig, manager: KVCacheManager, max_concurrent_steps: int) -> Limits:
        """The limits of a resolved configuration. Raises ConfigError if one was left open."""
        budget = _set("scheduler.max_num_batched_tokens", config.scheduler.max_num_batched_tokens)
        max_model_len = _set("model.max_model_len", config.model.max_model_len)
        chunked = config.scheduler.enable_chunked_prefill
        # A window keeps blocks for what a step computes at once. A prompt alone in a cache too small for its whole
        # chunk is given smaller ones, down to a block.
        in_flight = max_concurrent_steps * (manager.block_size if chunked else budget)
        return cls(
            max_num_batched_tokens=budget,
            max_num_seqs=_set("scheduler.max_num_seqs", config.scheduler.max_num_seqs),
            max_model_len=max_model_len,
            pool_tokens=largest(max_model_len, lambda length: manager.fits(length, min(length, in_flight))),
            chunked_prefill=chunked,
        )

    def check(self, request: EngineRequest) -> None:
        """Raise InvalidRequestError if `request` can never be served."""
        length = len(request.prompt_token_ids)
        prior = request.prior_outputs
        total = length + max((len(output.token_ids) for output in prior if output.finish_reason is None), default=0)
        if not length:
            raise InvalidRequestError("The prompt has no tokens; it needs at least one.", param="prompt")
        if total + min(request.max_tokens, 1) > self.max_model_len:
            room = " and leaves no room for an answer" if total == self.max_model_len else ""
            raise InvalidRequestError(
                f"The prompt has {total} tokens, but max_model_len is {self.max_model_len}{room}.", param="prompt"
            )
        if total > self.pool_tokens:
            raise InvalidRequestError(
                f"The prompt has {total} tokens, but the KV cache holds at most {self.pool_tokens} of one sequence.",
                param="prompt",
                hint="Give the cache more blocks (kv_cache.num_blocks or kv_cache.memory_gib).",
            )
        if not self.chunked_prefill and length > self.max_num_batched_tokens:
            raise InvalidRequestError(
                f"The prompt has {length} tokens, but a step takes at most {self.max_num_batched_tokens} and "
                "chunked prefill is off.",
                param="prompt",
            )
        if prior and len(prior) != request.sampling_params.n:
            raise InvalidRequestError(
                f"A request with n={request.sampling_params.n} cannot go on after {len(prior)} earlier outputs.",
                param="n",
            )
        if prior and all(output.finish_reason is not None for output in prior):
            raise InvalidRequestError("Every sequence of the request has ended already.", param="n")
        if request.pooling is not None and (request.max_tokens or request.sampling_params.n > 1):
            raise InvalidRequestError("An embedding is made of one prompt, and nothing is generated.", param="pooling")

    def stop_at(self, request: EngineRequest) -> int:
        """Length at which each sequence of `request` ends with "length".

        A prompt that fills the KV cache still gets one token, whose own keys and values are never needed. A scoring
        request, which samples nothing, ends by other means.
        """
        prompt = len(request.prompt_token_ids)
        longest = max(min(self.max_model_len, self.pool_tokens), prompt + 1)
        return min(prompt + max(request.max_tokens, 1), longest)


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number of 0..limit for which `fits` holds, if it holds for all smaller ones too."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _set(key: str, value: int | None) -> int:
    if value is None:
        raise ConfigError(f"{key} must be resolved to a number before the engine starts.")
    return value
