"""Numbers about the engine: of one step for observers, and a snapshot of the whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmkit.registry.breaker import FaultCount


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step, as its result has just been applied.

    num_requests: rows. num_tokens: tokens computed. num_sampled: rows that sampled. num_running, num_waiting: after
    the step. kv_usage: 0..1. num_preemptions, prefix_query_tokens, prefix_hit_tokens: totals so far.
    plan_s, wait_s, update_s: seconds spent making the plan, waiting for the result, applying it.
    failed: whether the step failed as a whole.
    """

    step: int
    num_requests: int
    num_tokens: int
    num_sampled: int
    num_running: int
    num_waiting: int
    kv_usage: float
    num_preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    plan_s: float
    wait_s: float
    update_s: float
    failed: bool


@dataclass(frozen=True, slots=True)
class StepSummary:
    """One step for live views. time: of its end, seconds since the epoch. num_tokens: computed; token_budget: that it
    might have computed. num_running, num_waiting: requests after it."""

    step: int
    time: float
    num_tokens: int
    token_budget: int
    num_running: int
    num_waiting: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at one moment; counters are totals since its start.

    num_out_of_memory: steps that found no memory and were done again in smaller ones. token_budget: tokens that a step
    may compute now. block_size: tokens of a block of the KV cache. sleep_level: None while awake. num_unfinished:
    requests taken in that have not ended. num_compiling: requests that wait for their grammar. num_loading: requests
    that wait for the connector. num_loads, num_failed_loads: loads that have ended.
    external_query_tokens: prompt tokens that the prefix cache did not have and a connector was asked for.
    external_hit_tokens: tokens that it has loaded. plugin_faults: `kind:name` of each plugin that was at fault since
    the engine has started → how often, whether it is still asked, and the last fault.
    num_swaps: preemptions by swap to host memory. num_swaps_missed: preemptions that the policy wanted by swap and that
    were, or became, recomputations. num_host_blocks: blocks of the swap space. connector: the connector's own numbers.
    """

    num_running: int
    num_waiting: int
    num_unfinished: int
    num_steps: int
    num_failed_steps: int
    num_preemptions: int
    kv_usage: float
    num_blocks: int
    num_free_blocks: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    num_loading: int = 0
    num_loads: int = 0
    num_failed_loads: int = 0
    external_query_tokens: int = 0
    external_hit_tokens: int = 0
    num_swaps: int = 0
    num_swaps_missed: int = 0
    block_size: int = 0
    num_host_blocks: int = 0
    num_free_host_blocks: int = 0
    num_compiling: int = 0
    num_out_of_memory: int = 0
    token_budget: int = 0
    sleep_level: int | None = None
    connector: dict[str, float] = field(default_factory=dict)
    plugin_faults: dict[str, FaultCount] = field(default_factory=dict)

    @property
    def num_policy_faults(self) -> int:
        """Answers of the scheduling policy that the core had to replace, and calls of it that took too long."""
        return sum(count.num_faults for name, count in self.plugin_faults.items() if name.startswith("scheduler:"))
