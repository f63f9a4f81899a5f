"""Engine-side state of one sequence, and of the group of sequences that answer one request."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from llmkit.requests.message import EngineRequest, FinishReason
from llmkit.requests.output import RequestMetrics

if TYPE_CHECKING:
    from llmkit.kv_cache.hashing import ExtraKey
    from llmkit.scheduling.sequence_grammar import SequenceGrammar

_MASK = 2**64 - 1


class RequestStatus(Enum):
    """WAITING: in the queue, with or without earlier progress. RUNNING: has a slot and blocks.
    PENDING: waits for the first sequence of its group to finish the common prefill. FINISHED: nothing more comes.
    LOADING: waits for the connector, with the blocks that are loaded, or for its answer, without.
    COMPILING: waits, without blocks, until its grammar is compiled."""

    WAITING = "waiting"
    RUNNING = "running"
    PENDING = "pending"
    FINISHED = "finished"
    LOADING = "loading"
    COMPILING = "compiling"


def sequence_seed(seed: int, index: int) -> int:
    """Seed of sequence `index` of a request with `seed`: the seed itself for index 0, else a mix of both.

    The mix is the finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
    2014) at seed + index * golden gamma, cut to 63 bits so that it fits a signed integer.
    """
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


class RequestGroup:
    """All `n` sequences of one EngineRequest, from `add` to the end of the last. Those that ended in an earlier engine
    have ended from the start; one at least has not.

    leader: the sequence that computes the prompt for all; the others are forked from it as long as it holds
    blocks. pending: those that wait for that. num_cached_tokens: fixed when the leader is first admitted.
    """

    __slots__ = (
        "errors",
        "finish_reasons",
        "leader",
        "metrics",
        "num_cached_tokens",
        "num_output_tokens",
        "num_unforked",
        "pending",
        "request",
        "sequences",
    )

    def __init__(self, request: EngineRequest, first_number: int, stop_at: int) -> None:
        count = request.sampling_params.n
        self.request = request
        self.sequences = [Request(self, index, first_number + index, stop_at) for index in range(count)]
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.finish_reasons: dict[int, FinishReason] = {}
        for index, prior in enumerate(request.prior_outputs):
            if prior.finish_reason is not None:
                self.sequences[index].status = RequestStatus.FINISHED
                self.finish_reasons[index] = prior.finish_reason
                self.num_output_tokens += len(prior.token_ids)
        unfinished = [sequence for sequence in self.sequences if sequence.status is not RequestStatus.FINISHED]
        self.leader = unfinished[0]
        self.pending = unfinished[:0:-1]
        for sequence in self.pending:
            sequence.status = RequestStatus.PENDING
        self.num_unforked = len(self.pending)
        self.errors: list[str] = []
        self.metrics = RequestMetrics(arrival_time=request.arrival_time)


class Request:
    """One sequence. Owned by the scheduler; everyone else sees `view`.

    token_ids: prompt and output, as far as known. num_computed_tokens: tokens whose keys and values are in the
    cache or will be once the submitted steps are done. num_expected_tokens: len(token_ids) plus the tokens that
    submitted steps will sample (placeholders). stop_at: length at which it ends. stop_length: shortest length at
    which a stop token ends it. capacity: tokens that its blocks have room for. commit_at: number of computed
    tokens from which the KV manager has something to do. last_step: last step that it is part of. valid_after: what
    steps up to this one have computed for it is wrong. counted: its prefix query is in the statistics.
    """

    __slots__ = (
        "cache_salt",
        "capacity",
        "commit_at",
        "counted",
        "eos_token_ids",
        "extra_keys",
        "grammar",
        "group",
        "has_sampled",
        "index",
        "last_step",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_expected_tokens",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "request",
        "request_id",
        "sampling",
        "seed",
        "sequence_id",
        "sequence_number",
        "slot",
        "status",
        "stop_at",
        "stop_length",
        "stop_token_ids",
        "token_ids",
        "valid_after",
        "view",
    )

    def __init__(self, group: RequestGroup, index: int, sequence_number: int, stop_at: int) -> None:
        request = group.request
        params = request.sampling_params
        self.group = group
        self.request = request
        self.request_id = request.request_id
        self.index = index
        self.sequence_id = f"{request.request_id}/{index}"
        self.sequence_number = sequence_number
        self.seed = sequence_seed(params.seed or 0, index)
        prior = request.prior_outputs[index].token_ids if request.prior_outputs else ()
        self.token_ids = [*request.prompt_token_ids, *prior]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.sampling = request.max_tokens > 0
        self.stop_at = stop_at
        self.stop_length = self.num_prompt_tokens + max(params.min_tokens, 1)
        self.stop_token_ids = request.stop_token_ids
        self.eos_token_ids = request.eos_token_ids
        self.cache_salt = request.cache_salt
        self.extra_keys: tuple[ExtraKey, ...] = ()
        self.grammar: SequenceGrammar | None = None
        self.status = RequestStatus.WAITING
        self.slot = -1
        self.num_computed_tokens = 0
        self.num_expected_tokens = len(self.token_ids)
        self.capacity = 0
        self.commit_at = 0
        self.last_step = -1
        self.valid_after = -1
        self.counted = False
        self.has_sampled = False
        self.num_cached_tokens = 0
        self.num_prompt_logprobs = request.num_prior_prompt_logprobs if index == 0 else 0
        self.num_preemptions = 0
        self.view = View(self)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether entries of prompt positions are still owed; only the first sequence owes them."""
        return (
            self.index == 0
            and self.request.sampling_params.prompt_logprobs is not None
            and self.num_prompt_logprobs < self.num_prompt_tokens
        )

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every prompt token has to be computed, so that one found in the cache is of no use."""
        return self.wants_prompt_logprobs or self.request.pooling == "mean"

    @property
    def forkable(self) -> bool:
        """Whether siblings can be forked from it: it holds blocks, and its prompt has been committed to them."""
        return self.has_sampled and self.capacity > 0 and not self.num_preemptions

    def __repr__(self) -> str:
        return (
            f"Request({self.sequence_id!r}, {self.status.value}, slot={self.slot}, "
            f"computed={self.num_computed_tokens}, expected={self.num_expected_tokens}, known={self.num_tokens})"
        )


class View:
    """What a policy sees of a request: `llmkit.hookspecs.scheduler.RequestView`, read-only and live."""

    __slots__ = ("__request", "__weakref__")

    def __init__(self, request: Request) -> None:
        self.__request = request

    @property
    def request_id(self) -> str:
        return self.__request.request_id

    @property
    def priority(self) -> int:
        return self.__request.request.priority

    @property
    def arrival_time(self) -> float:
        return self.__request.request.arrival_time

    @property
    def sequence_number(self) -> int:
        return self.__request.sequence_number

    @property
    def user(self) -> str | None:
        return self.__request.request.user

    @property
    def index(self) -> int:
        return self.__request.index

    @property
    def extra_args(self) -> Mapping[str, Any]:
        return MappingProxyType(self.__request.request.sampling_params.extra_args or {})

    @property
    def num_prompt_tokens(self) -> int:
        return self.__request.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        return self.__request.num_tokens

    @property
    def num_computed_tokens(self) -> int:
        return self.__request.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.__request.num_output_tokens

    @property
    def max_tokens(self) -> int:
        return self.__request.request.max_tokens

    @property
    def num_preemptions(self) -> int:
        return self.__request.num_preemptions

    def __repr__(self) -> str:
        return f"View({self.request_id!r}, number={self.sequence_number}, priority={self.priority})"
