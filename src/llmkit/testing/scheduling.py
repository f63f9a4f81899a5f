"""A scheduler on trial: a whole engine around any policy, with a fake model, checked after every step.

For authors of scheduling policies: `check_policy(MyPolicy)` runs the conformance scenarios.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from llmkit.config.engine_config import EngineConfig
from llmkit.config.sections import ConnectorConfig, ModelConfig, SchedulerConfig
from llmkit.engine.core import EngineCore
from llmkit.hookspecs.connector import Connector, SchedulerContext, WorkerContext
from llmkit.hookspecs.scheduler import SchedulerPolicy
from llmkit.kv_cache.layout import KVCacheLayout, KVGroup, KVSpec
from llmkit.registry.breaker import Breaker
from llmkit.registry.breakers import Breakers
from llmkit.requests.logprobs import PositionLogprobs
from llmkit.requests.message import EngineOutput, EngineRequest
from llmkit.requests.output import FinishedRequest
from llmkit.requests.request import sequence_seed
from llmkit.requests.sampling_params import SamplingParams
from llmkit.scheduling.guarded_connector import GuardedConnector
from llmkit.scheduling.plan import StepPlan
from llmkit.scheduling.scheduler import Scheduler
from llmkit.testing.fake_executor import VOCABULARY, FakeExecutor, fake_answer

if TYPE_CHECKING:
    from llmkit.grammars.service import GrammarService

_PARAMS = frozenset(SamplingParams.__struct_fields__)


@dataclass(slots=True)
class Answer:
    """Everything that the engine has told of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    error_param: str | None = None
    num_cached_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    prompt_logprobs: list[PositionLogprobs | None] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    embedding: list[float] | None = None


class SchedulingHarness:
    """An engine core around `policy` with a fake model and a tiny cache.

    num_blocks: usable ones. num_host_blocks: swap space, for policies that preempt by swap. windows: sliding window
    of each KV group, None for full attention. The other arguments are settings of the same name. `step` checks: the
    plan against the fake cache, the books of scheduler and KV manager, that no step passes without progress, and each
    token against the fake model run alone.
    connector: both halves of it are driven, on the fake cache; connector_settings: of the section `connector`;
    trusts_connector: whether it must give back what it holds; fault_limit: faults until it is left alone. clock: what
    loads are timed with. grammars: compiles the grammars of requests.
    """

    def __init__(
        self,
        policy: SchedulerPolicy,
        *,
        num_blocks: int = 32,
        block_size: int = 4,
        max_num_batched_tokens: int = 64,
        max_num_seqs: int = 4,
        max_model_len: int = 128,
        max_concurrent_steps: int = 1,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        windows: tuple[int | None, ...] = (None,),
        num_host_blocks: int = 0,
        before_step: Callable[[StepPlan], None] | None = None,
        failing_rows: Callable[[StepPlan], dict[int, str]] | None = None,
        connector: Connector | None = None,
        connector_settings: Mapping[str, Any] | None = None,
        trusts_connector: bool = True,
        fault_limit: int = 5,
        clock: Callable[[], float] = monotonic,
        grammars: GrammarService | None = None,
    ) -> None:
        config = EngineConfig(
            extensions=(),
            connector=ConnectorConfig(**connector_settings or {}),
            model=ModelConfig(max_model_len=max_model_len),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
                enable_chunked_prefill=enable_chunked_prefill,
            ),
        )
        groups = tuple(KVGroup(KVSpec(1, 1, torch.float32, window), (i,)) for i, window in enumerate(windows))
        layout = KVCacheLayout(groups, num_blocks + 1, block_size, block_size, enable_prefix_caching, num_host_blocks)
        self.executor = FakeExecutor(
            max_concurrent_steps,
            budget=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            before_step=before_step,
            failing_rows=failing_rows,
            connector=None if connector is None else connector.worker_half(WorkerContext(0, 1, "fake", "both")),
        )
        self.executor.allocate(layout)
        self.trusts_connector = trusts_connector
        breakers = _breakers(fault_limit, clock)
        self.connector = None if connector is None else _guarded(connector, config, layout, breakers)
        self.scheduler = Scheduler(
            config,
            layout,
            policy,
            max_concurrent_steps,
            connector=self.connector,
            clock=clock,
            grammars=grammars,
            vocab_size=VOCABULARY,
        )
        self.core = EngineCore(self.scheduler, self.executor, observers=(self,), breakers=breakers)
        self.requests: dict[str, EngineRequest] = {}
        self.answers: dict[tuple[str, int], Answer] = {}
        self.finished: list[FinishedRequest] = []

    def llmkit_request_finished(self, request: FinishedRequest) -> None:
        self.finished.append(request)

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 8, **fields: Any) -> None:
        """Add a request; `fields` are fields of SamplingParams or EngineRequest."""
        params = {name: fields.pop(name) for name in list(fields) if name in _PARAMS}
        defaults: dict[str, Any] = {
            "stop_token_ids": frozenset(params.get("stop_token_ids", ())),
            "arrival_time": float(len(self.requests)),
        }
        sampled = 1 if fields.get("pooling") is not None else max_tokens
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            sampling_params=SamplingParams(**{"seed": 0} | params | {"max_tokens": sampled}),
            **defaults | fields,
        )
        self.core.add(request)
        self.requests[request_id] = request
        for index in range(request.sampling_params.n):
            self.answers[request_id, index] = Answer()

    def step(self) -> list[EngineOutput]:
        """One step of the core, and all checks."""
        before = self.scheduler.landed_step
        outputs = self.core.step()
        for output in outputs:
            self._take(output)
        if self.executor.violations:
            raise self.executor.violations[0]
        waits = len(self.scheduler.grammars) or self.scheduler.grammars.masks.num_late
        stuck = self.core.has_work() and not outputs and not waits and self.scheduler.landed_step == before
        assert not stuck, "a step without progress"
        self.scheduler.check_integrity()
        return outputs

    def run(self, max_steps: int = 20_000) -> int:
        """Step until nothing is left to do, check that everything is given back; the number of steps."""
        steps = 0
        while self.core.has_work():
            self.step()
            steps += 1
            assert steps < max_steps, f"not done after {steps} steps"
        self.check_drained()
        return steps

    def check_drained(self) -> None:
        """Nothing runs, waits or holds a block, and every request has ended once. Blocks that an untrustworthy
        connector never gives back are not missed."""
        lost = not self.core.settle_transfers(5.0 if self.trusts_connector else 0.0)
        assert not (lost and self.trusts_connector), "blocks are still held for the connector"
        stats = self.core.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_unfinished) == (0, 0, 0), stats
        assert stats.num_loading == 0, stats
        assert lost or stats.num_free_blocks == stats.num_blocks, stats
        assert stats.num_free_host_blocks == stats.num_host_blocks, stats
        assert len(self.finished) == len(self.requests)
        for request in self.finished:
            assert len(request.finish_reasons) == self.requests[request.request_id].sampling_params.n

    def expected(self, request_id: str, index: int = 0) -> list[int]:
        """The tokens of a sequence run alone, by the stop conditions."""
        request = self.requests[request_id]
        prompt = request.prompt_token_ids
        prior = list(request.prior_outputs[index].token_ids) if request.prior_outputs else []
        longest = min(self.scheduler.limits.stop_at(request) - len(prompt), request.max_tokens)
        seed = sequence_seed(request.sampling_params.seed or 0, index)
        answer = fake_answer([*prompt, *prior], seed, max(0, longest - len(prior)))
        for position, token in enumerate(answer):
            length = len(prior) + position + 1
            if token in request.stop_token_ids and length >= request.sampling_params.min_tokens:
                return answer[: position + 1]
        return answer

    def check_answers(self) -> None:
        """Every sequence that ended by itself has exactly the tokens it would have had alone."""
        for (request_id, index), answer in self.answers.items():
            request = self.requests[request_id]
            if answer.finish_reason in ("stop", "length") and request.grammar is None and request.pooling is None:
                assert answer.token_ids == self.expected(request_id, index), (request_id, index)

    def _take(self, output: EngineOutput) -> None:
        key = output.request_id, output.index
        answer = self.answers[key]
        assert answer.finish_reason is None, f"news of {key} after its end"
        answer.token_ids += output.new_token_ids
        answer.finish_reason = output.finish_reason
        answer.stop_reason = output.stop_reason
        answer.error, answer.error_param = output.error, output.error_param
        answer.num_cached_tokens = output.num_cached_tokens
        answer.kv_transfer_params = output.kv_transfer_params
        answer.prompt_logprobs += output.prompt_logprobs or []
        answer.logprobs += output.logprobs or []
        answer.embedding = output.embedding
        if self.requests[key[0]].grammar is not None:
            return  # what it should be depends on the grammar
        expected = self.expected(*key)
        assert answer.token_ids == expected[: len(answer.token_ids)], f"wrong tokens of {key}"


def _breakers(fault_limit: int, clock: Callable[[], float]) -> Breakers:
    breakers = Breakers()
    breakers.add(Breaker("connector", "fake", fault_limit, clock=clock))
    return breakers


def _guarded(connector: Connector, config: EngineConfig, layout: KVCacheLayout, breakers: Breakers) -> GuardedConnector:
    new_id = itertools.count(1).__next__
    length = config.model.max_model_len or 0

    def breaker_of(name: str, number: int) -> Breaker:
        return breakers.of("connector", name, number)

    role = config.connector.role
    context = SchedulerContext(layout, "fake", 1, length, role, new_id, breaker_of=breaker_of)
    return GuardedConnector(connector.scheduler_half(context), breakers.of("connector", "fake"), new_id)


def check_policy(make_policy: Callable[[], SchedulerPolicy], seed: int = 0, scenarios: int = 20) -> None:
    """Conformance of a policy: under random load in a tiny cache, all requests are answered right, and the core never
    has to replace an answer of the policy. Raises AssertionError.
    """
    for number in range(scenarios):
        random_ = random.Random(seed * 1_000_003 + number)
        harness = SchedulingHarness(
            make_policy(),
            num_blocks=random_.randint(8, 24),
            max_num_batched_tokens=random_.choice([4, 7, 16, 64]),
            max_num_seqs=random_.randint(1, 6),
            max_concurrent_steps=random_.choice([1, 2]),
            num_host_blocks=random_.choice([0, 8, 60]),
        )
        for request in range(random_.randint(1, 12)):
            harness.add(
                f"request-{request}",
                [random_.randint(0, 2) for _ in range(random_.randint(1, 20))],
                random_.randint(1, 12),
                n=random_.choice([1, 1, 3]),
                priority=random_.randint(-2, 2),
                user=random_.choice([None, "a", "b"]),
            )
            if random_.random() < 0.2:
                harness.core.abort([f"request-{random_.randrange(request + 1)}"])
            for _ in range(random_.randint(0, 4)):
                harness.step()
        harness.run()
        harness.check_answers()
        faults = harness.core.stats().num_policy_faults
        assert not faults, f"the policy gave {faults} answers that break its contract"
