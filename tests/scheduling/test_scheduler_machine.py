"""The whole scheduler against the fake model, under random load, aborts and failures, checked after every step.

LLMKIT_DEEP_TESTS=1 runs it for long (several times 10 000 steps for each policy).
"""

from __future__ import annotations

import contextlib
import os

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from llmkit.errors import InvalidRequestError
from llmkit.requests.message import PriorOutput
from llmkit.requests.request import RequestStatus
from llmkit.testing.hostile_connector import FlakyConnector, HostileConnector
from llmkit.testing.hostile_policy import HostilePolicy
from llmkit.testing.memory_connector import MemoryStore
from llmkit.testing.scheduling import SchedulingHarness
from llmkit_schedulers.classic import ClassicPolicy
from llmkit_schedulers.fair import FairPolicy
from llmkit_schedulers.fcfs import FcfsPolicy
from llmkit_schedulers.priority import PriorityOptions, PriorityPolicy
from llmkit_schedulers.srtf import SrtfPolicy

DEEP = os.environ.get("LLMKIT_DEEP_TESTS") == "1"
PROMPTS = st.lists(st.sampled_from([0, 1]), min_size=1, max_size=30)
CONFIGURATIONS = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(4, 24),
        "block_size": st.sampled_from([1, 2, 4]),
        "max_num_batched_tokens": st.sampled_from([1, 3, 8, 24, 64]),
        "max_num_seqs": st.integers(1, 5),
        "max_model_len": st.sampled_from([24, 48]),
        "max_concurrent_steps": st.sampled_from([1, 2, 3]),
        "enable_prefix_caching": st.booleans(),
        "enable_chunked_prefill": st.sampled_from([True, True, False]),
        "windows": st.sampled_from([(None,), (None,), (None, 6), (3,)]),
        "num_host_blocks": st.sampled_from([0, 3, 10, 60]),
    }
)


CONNECTOR_SETTINGS = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["both", "both", "both", "producer", "consumer"]),
        "load_failure_policy": st.sampled_from(["recompute", "recompute", "fail"]),
        "load_timeout_s": st.sampled_from([1.0, 5.0]),
    }
)


def _prior_outputs(n):
    """What an earlier engine may have produced for n sequences, of which the last has not ended."""
    going_on = st.sampled_from([PriorOutput(), PriorOutput((1, 0, 1)), PriorOutput((2,))])
    ended = st.just(PriorOutput((3, 4), "stop"))
    return st.tuples(*[st.one_of(going_on, ended)] * (n - 1), going_on)


class SeparateFcfs(FcfsPolicy):
    """Keeps prefill and decode in different steps."""

    mixes_prefill_and_decode = False


class SmallChunks(PriorityPolicy):
    """Computes prompts a few tokens at a time, and admits one request at a time."""

    def chunk(self, request, offered):
        return min(offered, 1 + request.sequence_number % 5)

    def admit(self, request, load):
        return load.num_running < 1 + request.sequence_number % 3


def swapping(policy, wanted=True):
    """The same policy, which preempts by swap."""
    policy.preemption = "swap" if wanted else "recompute"
    return policy


class SchedulerMachine(RuleBasedStateMachine):
    @staticmethod
    def make_policy(seed):
        raise NotImplementedError

    @staticmethod
    def make_connector(seed):  # noqa: ARG004
        return None

    @initialize(configuration=CONFIGURATIONS, seed=st.integers(0, 1000), connector_settings=CONNECTOR_SETTINGS)
    def start(self, configuration, seed, connector_settings):
        self.fail_next = ""
        self.count = 0
        self.now = 0.0
        self.connector = self.make_connector(seed)
        self.fails_requests = connector_settings.get("load_failure_policy") == "fail"
        if self.connector is not None:
            trusts = not isinstance(self.connector, HostileConnector)
            configuration |= {
                "enable_prefix_caching": True,
                "connector": self.connector,
                "connector_settings": connector_settings,
                "trusts_connector": trusts,
                "clock": self.clock,
            }
        if not configuration["enable_chunked_prefill"]:
            configuration["max_num_batched_tokens"] = configuration["max_model_len"]
        self.harness = SchedulingHarness(
            self.make_policy(seed),
            before_step=self.before_step,
            failing_rows=self.failing_rows,
            **configuration,
        )

    def clock(self):
        self.now += 0.01
        return self.now

    def before_step(self, plan):  # noqa: ARG002
        what = self.fail_next
        if what in ("step", "interrupt"):
            self.fail_next = ""
            raise RuntimeError("an injected failure") if what == "step" else KeyboardInterrupt

    def failing_rows(self, plan):
        if self.fail_next == "row":
            self.fail_next = ""
            return {plan.num_rows - 1: "an injected failure"}
        return {}

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(0, 20),
        n=st.sampled_from([1, 1, 2, 4]),
        priority=st.integers(-1, 2),
        stop=st.sets(st.integers(0, 210), max_size=60),
        data=st.data(),
    )
    def add(self, prompt, max_tokens, n, priority, stop, data):
        score = max_tokens == 0 or data.draw(st.sampled_from([True, False, False, False]))
        prior = () if score else data.draw(st.one_of(st.just(()), st.just(()), _prior_outputs(n)))
        fields = {
            "n": n,
            "seed": data.draw(st.integers(0, 3)),
            "min_tokens": data.draw(st.integers(0, max_tokens)),
            "stop_token_ids": tuple(stop),
            "prompt_logprobs": 0 if score else None,
            "logprobs": data.draw(st.sampled_from([None, None, 0])),
            "priority": priority,
            "user": data.draw(st.sampled_from([None, "a", "b"])),
            "prior_outputs": prior,
            "cache_salt": data.draw(st.sampled_from([None, None, "salt"])),
        }
        try:
            self.harness.add(f"r{self.count}", prompt, max_tokens, **fields)
        except InvalidRequestError:
            limits = self.harness.scheduler.limits
            length = len(prompt) + max((len(p.token_ids) for p in prior if p.finish_reason is None), default=0)
            fits = length <= limits.pool_tokens and length + min(max_tokens, 1) <= limits.max_model_len
            assert not fits or (not limits.chunked_prefill and length > limits.max_num_batched_tokens)
        self.count += 1

    @precondition(lambda self: self.harness.requests)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.harness.requests)))
        if data.draw(st.booleans()):
            self.harness.core.abort([request_id, "unknown"])
        else:
            count = self.harness.requests[request_id].sampling_params.n
            self.harness.core.abort_sequence(request_id, data.draw(st.integers(0, count - 1)))
        self.harness.scheduler.check_integrity()

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self.harness.step()

    @precondition(lambda self: not self.fail_next)
    @rule(what=st.sampled_from(["step", "row"]))
    def fail(self, what):
        self.fail_next = what
        self.harness.step()

    @precondition(lambda self: not self.fail_next)
    @rule()
    def interrupt(self):
        self.fail_next = "interrupt"
        with contextlib.suppress(KeyboardInterrupt):
            self.harness.step()
        self.fail_next = ""
        self.harness.scheduler.check_integrity()

    @precondition(lambda self: self.connector is None)
    @rule()
    def reset_prefix_cache(self):
        scheduler = self.harness.scheduler
        holding = any(request.status is RequestStatus.RUNNING for request in scheduler.running.snapshot())
        assert self.harness.core.reset_prefix_cache() is not holding
        stats = self.harness.core.stats()
        assert holding or stats.num_free_host_blocks == stats.num_host_blocks
        scheduler.check_integrity()

    @precondition(lambda self: self.connector is not None and self.harness.trusts_connector)
    @rule()
    def reset_prefix_cache_and_store(self):
        unfinished = self.harness.core.has_work()
        done = self.harness.core.reset_prefix_cache()
        assert done or unfinished
        assert not done or not self.connector.store.blocks
        self.harness.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "harness"):
            return
        self.fail_next = ""
        harness = self.harness
        harness.run()
        harness.check_answers()
        for (request_id, index), answer in harness.answers.items():
            request = harness.requests[request_id]
            if answer.finish_reason not in ("stop", "length"):
                lost = answer.error and "could not be loaded" in answer.error
                assert not lost or self.fails_requests
                continue
            if request.sampling_params.prompt_logprobs is not None and index == 0:
                told = [entry and entry.token_ids[0] for entry in answer.prompt_logprobs]
                assert told == [None, *request.prompt_token_ids[1:]]
            if request.sampling_params.logprobs is not None:
                assert [entry.token_ids[0] for entry in answer.logprobs] == answer.token_ids


def machine(name, policy, connector=lambda _: None, examples=40):
    """The machine's test case for one policy, and maybe a connector. examples: of a quick run."""
    makers = {"make_policy": staticmethod(policy), "make_connector": staticmethod(connector)}
    kind = type(name, (SchedulerMachine,), makers)
    case = kind.TestCase
    case.settings = settings(
        max_examples=1500 if DEEP else examples,
        stateful_step_count=60 if DEEP else 30,
        deadline=None,
        derandomize=not DEEP,
        database=None,
    )
    return case


TestFcfs = machine("Fcfs", lambda _: FcfsPolicy())
TestSwapping = machine("Swapping", lambda _: swapping(FcfsPolicy()))
TestPriority = machine("Priority", lambda seed: PriorityPolicy(PriorityOptions(aging_s=None if seed % 2 else 2.0)))
TestSeparate = machine("Separate", lambda seed: swapping(SeparateFcfs(), seed % 2))
TestSmallChunks = machine("SmallChunks", lambda seed: swapping(SmallChunks(), seed % 2))
TestFair = machine("Fair", lambda _: FairPolicy(), examples=15)
TestClassic = machine("Classic", lambda _: ClassicPolicy(), examples=15)
TestSrtf = machine("Srtf", lambda _: SrtfPolicy(), examples=15)
TestHostile = machine("Hostile", lambda seed: swapping(HostilePolicy(seed), seed % 2))
TestConnector = machine("Connector", lambda _: FcfsPolicy(), lambda seed: FlakyConnector(MemoryStore(), seed))
TestConnectorSmallChunks = machine(
    "ConnectorSmallChunks", lambda _: SmallChunks(), lambda seed: FlakyConnector(MemoryStore(), seed, 0.1)
)
TestConnectorHostilePolicy = machine(
    "ConnectorHostilePolicy", HostilePolicy, lambda seed: FlakyConnector(MemoryStore(), seed)
)
TestHostileConnector = machine(
    "HostileConnector", lambda _: FcfsPolicy(), lambda seed: HostileConnector(MemoryStore(), seed)
)
