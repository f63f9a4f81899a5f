"""Two users, one of whom sends 20 times as many requests: what the other gets, under several scheduling policies.

    python benchmarks/fairness.py [--policies fcfs,fair,srtf,classic] [--model MODEL]

A whole engine core with an executor that computes nothing and a clock that runs by a cost model (an 8B model on a large
GPU: 4.8 ms a step, 0.02 ms a row, 41 000 prompt tokens a second), so the result is the same on every machine. Prints
JSON. Two loads, both more than the engine can serve:

- "modest": the small user asks for less than its half. Its requests should hardly wait.
- "backlogged": both ask for more than their halves. What they get should differ by no more than the bound.

Service is counted as in Sheng et al., Fairness in Serving Large Language Models (OSDI 2024): prompt tokens when a
request enters, plus 2 per output token. With U = 2 x tokens of a full batch, two backlogged users differ by at most
2 U, and a request of a user who has none waiting or running enters before the other, who always waits, has got more
than 2 U, so within 2 U / capacity (`FairPolicy.service_bound` says why).

With --model, also on a real model and the real clock: 40 requests of one user, then 2 of another.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch

from llmkit.config.engine_config import EngineConfig
from llmkit.config.sections import ModelConfig, SchedulerConfig
from llmkit.engine.core import EngineCore
from llmkit.kv_cache.layout import KVCacheLayout, KVGroup, KVSpec
from llmkit.registry import Registry, detect_environment
from llmkit.requests.message import EngineRequest
from llmkit.requests.sampling_params import SamplingParams
from llmkit.scheduling.plan import StepPlan
from llmkit.scheduling.scheduler import Scheduler
from llmkit.testing.fake_executor import NullExecutor

STEP_S, ROW_S, PROMPT_TOKEN_S = 4.8e-3, 2e-5, 1 / 41_000
MAX_NUM_SEQS, BUDGET, BLOCK = 16, 2048, 16
PROMPT, ANSWER = (64, 512), (64, 256)
OUTPUT_WEIGHT = 2
UNIT = OUTPUT_WEIGHT * MAX_NUM_SEQS * (PROMPT[1] + ANSWER[1])
"""U of the bounds."""


class TimedExecutor(NullExecutor):
    """Every step takes as long as the cost model says."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.entered: dict[str, float] = {}

    def submit(self, plan: StepPlan) -> Any:
        for row in plan.added:
            self.entered.setdefault(row.request.request_id, self.now)
        prompt_tokens = plan.num_tokens - int((plan.num_new == 1).sum())
        self.now += STEP_S + ROW_S * plan.num_rows + PROMPT_TOKEN_S * prompt_tokens
        return super().submit(plan)


@dataclass
class Book:
    """What has happened to the requests of one user."""

    service: float = 0.0
    waits: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    waiting: int = 0

    def summary(self) -> dict[str, float]:
        def of(values: list[float]) -> list[float]:
            return sorted(values) or [float("nan")]

        waits, firsts = of(self.waits), of(self.first_tokens)
        return {
            "served": len(self.first_tokens),
            "wait_p50_s": round(statistics.median(waits), 3),
            "wait_max_s": round(waits[-1], 3),
            "ttft_p50_s": round(statistics.median(firsts), 3),
            "ttft_p99_s": round(firsts[int(0.99 * (len(firsts) - 1))], 3),
        }


def requests_of(rates: dict[str, float], seconds: float) -> list[EngineRequest]:
    """Poisson arrivals of several users with `rates` requests a second each, sorted by time."""
    draw = random.Random(7)
    made = []
    for user, rate in rates.items():
        time = draw.expovariate(rate)
        while time < seconds:
            answer = draw.randint(*ANSWER)
            made.append(
                EngineRequest(
                    request_id=f"{user}-{len(made)}",
                    prompt_token_ids=[draw.randrange(30_000) for _ in range(draw.randint(*PROMPT))],
                    sampling_params=SamplingParams(seed=1, max_tokens=answer),
                    max_tokens=answer,
                    arrival_time=time,
                    user=user,
                )
            )
            time += draw.expovariate(rate)
    return sorted(made, key=lambda request: request.arrival_time)


def engine(policy: str) -> tuple[EngineCore, TimedExecutor]:
    length = PROMPT[1] + ANSWER[1]
    config = EngineConfig(
        model=ModelConfig(max_model_len=length),
        scheduler=SchedulerConfig(max_num_batched_tokens=BUDGET, max_num_seqs=MAX_NUM_SEQS),
    )
    blocks = 1 + MAX_NUM_SEQS * -(-length // BLOCK)
    layout = KVCacheLayout((KVGroup(KVSpec(8, 128, torch.bfloat16), (0,)),), blocks, BLOCK, BLOCK, num_host_blocks=64)
    made = Registry.discover().create("scheduler", policy, detect_environment())
    executor = TimedExecutor()
    return EngineCore(Scheduler(config, layout, made), executor), executor


class Simulation:
    """Serves arrivals up to a moment, and keeps a book for each of two users."""

    def __init__(self, policy: str, rates: dict[str, float], seconds: float) -> None:
        self._core, self._executor = engine(policy)
        self._arrivals = requests_of(rates, seconds)
        self._requests = {request.request_id: request for request in self._arrivals}
        self._seconds = seconds
        self._position = 0
        self._started: set[str] = set()
        self._told: set[str] = set()
        self.users = {user: Book() for user in rates}
        self.differences: list[list[float]] = [[]]
        """Of the users' service, step by step; a list for each stretch of time in which both wait."""
        self.served_while_both_wait = dict.fromkeys(rates, 0.0)
        self.capacities: list[float] = []

    def run(self) -> None:
        window_start, window_service = 0.0, 0.0
        while self._executor.now < self._seconds:
            self._arrive()
            if not self._core.has_work():
                self._executor.now = self._arrivals[self._position].arrival_time
                continue
            before = {user: book.service for user, book in self.users.items()}
            self._step()
            gained = {user: book.service - before[user] for user, book in self.users.items()}
            if all(book.waiting for book in self.users.values()):
                first, second = self.users.values()
                self.differences[-1].append(first.service - second.service)
                for user, service in gained.items():
                    self.served_while_both_wait[user] += service
            elif self.differences[-1]:
                self.differences.append([])
            window_service += sum(gained.values())
            if self._executor.now - window_start >= 1.0:
                self.capacities.append(window_service / (self._executor.now - window_start))
                window_start, window_service = self._executor.now, 0.0

    def _arrive(self) -> None:
        while self._position < len(self._arrivals):
            request = self._arrivals[self._position]
            if request.arrival_time > self._executor.now:
                return
            self._core.add(request)
            self._book(request.request_id).waiting += 1
            self._position += 1

    def _step(self) -> None:
        outputs = self._core.step()
        for request_id in self._executor.entered.keys() - self._started:
            book, request = self._book(request_id), self._requests[request_id]
            self._started.add(request_id)
            book.waiting -= 1
            book.service += len(request.prompt_token_ids)
            book.waits.append(self._executor.entered[request_id] - request.arrival_time)
        for output in outputs:
            book = self._book(output.request_id)
            book.service += OUTPUT_WEIGHT * len(output.new_token_ids)
            if output.new_token_ids and output.request_id not in self._told:
                self._told.add(output.request_id)
                book.first_tokens.append(self._executor.now - self._requests[output.request_id].arrival_time)

    def _book(self, request_id: str) -> Book:
        return self.users[self._requests[request_id].user or ""]


def simulate(policy: str, rates: dict[str, float], seconds: float) -> dict[str, Any]:
    """The summary of a simulation. The difference is the largest over any stretch of time in which both users wait."""
    run = Simulation(policy, rates, seconds)
    run.run()
    capacity = min(run.capacities[1:])
    served = run.served_while_both_wait
    return {
        **{user: book.summary() for user, book in run.users.items()},
        "share_of_few_while_both_wait": round(served["few"] / max(1.0, sum(served.values())), 3),
        "largest_difference": round(max(max(one) - min(one) for one in run.differences if one)),
        "bound_of_difference": 2 * UNIT,
        "least_capacity_per_s": round(capacity),
        "bound_of_wait_s": round(2 * (len(rates) - 1) * UNIT / capacity, 2),
    }


def on_a_model(policy: str, model: str) -> dict[str, Any]:
    """40 requests of one user at once, then 2 of another, on the real clock."""
    from llmkit import LLM

    with LLM(model, scheduler=policy, max_num_seqs=8, max_model_len=256, num_blocks=200) as llm:
        prompts = [[(7 * i + j) % 30_000 + 10 for j in range(64)] for i in range(42)]
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        llm.generate(prompts[:2], SamplingParams(temperature=0, max_tokens=2))
        llm.reset_prefix_cache()
        outputs = llm.generate(prompts, params, user=["many"] * 40 + ["few"] * 2, use_tqdm=False)
    latency = [output.metrics.first_token_time - output.metrics.arrival_time for output in outputs]
    ends = [output.metrics.finished_time - output.metrics.arrival_time for output in outputs]
    return {
        "few_ttft_s": round(max(latency[40:]), 2),
        "few_done_s": round(max(ends[40:]), 2),
        "many_ttft_mean_s": round(statistics.mean(latency[:40]), 2),
        "all_done_s": round(max(ends), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Shares and waiting times of two users, one 20 times as busy.")
    parser.add_argument("--policies", default="fcfs,fair,srtf,classic")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--model", help="also run this model, on the real clock")
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    for policy in arguments.policies.split(","):
        result[policy] = {
            "modest": simulate(policy, {"many": 40.0, "few": 2.0}, arguments.seconds),
            "backlogged": simulate(policy, {"many": 240.0, "few": 12.0}, arguments.seconds / 3),
        }
        if arguments.model:
            result[policy]["model"] = on_a_model(policy, arguments.model)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
