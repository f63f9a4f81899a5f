"""Every metric that /metrics shows. Names, labels and buckets are those of vLLM, so that its dashboards work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from llmkit.engine.stats import EngineStats
from llmkit.metrics.engine import EngineTotals
from llmkit_server.metrics.families import Families

if TYPE_CHECKING:
    from llmkit_server.context import ServerContext

_SLEEP_STATES = {None: "awake", 0: "paused", 1: "weights_offloaded", 2: "discard_all"}


class ServerCollector(Collector):
    """Reads the numbers of a server at the moment of the collection; waits for nothing."""

    def __init__(self, server: ServerContext) -> None:
        self._server = server
        self._families = Families(server.settings.metrics_prefix, {"model_name": server.models.names[0], "engine": "0"})

    def describe(self) -> Iterator[Metric]:
        """Nothing: names would be collected once more, at registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        history = self._server.engine_watch.history
        latest = history.latest
        alive = self._server.llm.health.alive
        yield from self._gauges(None if latest is None or not alive else latest.stats)
        yield from self._engine_counters(history.totals)
        yield from self._request_counters()
        yield from self._request_times()
        yield from self._request_sizes()
        yield from self._speculation()
        yield from self._http()

    def _gauges(self, stats: EngineStats | None) -> Iterator[Metric]:
        f = self._families
        running = 0 if stats is None else stats.num_running
        waiting = 0 if stats is None else stats.num_waiting + stats.num_compiling + stats.num_loading
        yield f.gauge("num_requests_running", "Sequences in the running batch.", running)
        yield f.gauge("num_requests_waiting", "Sequences that wait to be computed.", waiting)
        usage = 0.0 if stats is None else stats.kv_usage
        yield f.gauge("kv_cache_usage_perc", "Share of the KV cache's blocks that are in use, 0 to 1.", usage)
        level = None if stats is None else stats.sleep_level
        states = [({"sleep_state": name}, float(level == number)) for number, name in _SLEEP_STATES.items()]
        yield f.gauge("engine_sleep_state", "1 for the state that the engine is in.", *states, own=("sleep_state",))
        yield self._cache_config(stats)
        adapters = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        yield f.gauge("lora_requests_info", "LoRA adapters in use.", (adapters, 0.0), own=tuple(adapters))

    def _cache_config(self, stats: EngineStats | None) -> Metric:
        cache = self._server.llm.config.kv_cache
        info = {
            "block_size": "" if stats is None else str(stats.block_size),
            "cache_dtype": cache.dtype,
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "gpu_memory_utilization": str(cache.gpu_memory_utilization),
            "num_gpu_blocks": "" if stats is None else str(stats.num_blocks),
            "num_cpu_blocks": "" if stats is None else str(stats.num_host_blocks),
        }
        return self._families.gauge("cache_config_info", "Settings of the KV cache.", (info, 1.0), own=tuple(info))

    def _engine_counters(self, totals: EngineTotals) -> Iterator[Metric]:
        f, count = self._families, totals.counters
        for name, field, text in (
            ("prefix_cache_queries", "prefix_query_tokens", "Prompt tokens looked up in the prefix cache."),
            ("prefix_cache_hits", "prefix_hit_tokens", "Prompt tokens found in the prefix cache."),
            ("external_prefix_cache_queries", "external_query_tokens", "Prompt tokens a connector was asked for."),
            ("external_prefix_cache_hits", "external_hit_tokens", "Prompt tokens that a connector has loaded."),
            ("num_preemptions", "num_preemptions", "Sequences that had to give up their blocks."),
            ("num_swaps", "num_swaps", "Of the preemptions, those by swap to host memory."),
            ("engine_steps", "num_steps", "Steps."),
            ("engine_failed_steps", "num_failed_steps", "Steps that failed as a whole."),
            ("engine_out_of_memory_steps", "num_out_of_memory", "Steps that found no memory and were done again."),
        ):
            yield f.counter(name, text, count[field])
        yield f.counter("engine_restarts", "Restarts of the engine process.", self._server.llm.health.num_restarts)
        yield f.histogram("iteration_tokens_total", "Tokens computed in a step.", totals.step_tokens)
        yield f.summary(
            "plugin_call_seconds",
            "Calls of plugins, and the seconds they took, estimated from those that are timed.",
            ("kind", "plugin", "hook"),
            [
                ({"kind": kind, "plugin": name, "hook": function}, calls.calls, calls.seconds)
                for (kind, name, function), calls in sorted(totals.plugin_calls.items())
            ],
        )

    def _request_counters(self) -> Iterator[Metric]:
        f, totals = self._families, self._server.llm.totals
        yield f.counter("prompt_tokens", "Prompt tokens processed, cached ones included.", totals.prompt_tokens)
        yield f.counter("prompt_tokens_cached", "Prompt tokens that were cached.", totals.prompt_tokens_cached)
        yield f.counter("generation_tokens", "Tokens generated.", totals.generation_tokens)
        ends = [({"finished_reason": reason}, float(count)) for reason, count in totals.finished.items()]
        yield f.counter("request_success", "Requests that have ended.", *ends, own=("finished_reason",))

    def _request_times(self) -> Iterator[Metric]:
        totals = self._server.llm.totals
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From arrival to first token.", totals.time_to_first_token),
            ("inter_token_latency_seconds", "Between two tokens of an answer.", totals.inter_token_latency),
            ("request_time_per_output_token_seconds", "Per token behind the first.", totals.time_per_output_token),
            ("e2e_request_latency_seconds", "From arrival to the end.", totals.e2e_latency),
            ("request_queue_time_seconds", "From arrival to the first step.", totals.queue_time),
            ("request_inference_time_seconds", "From the first step to the last token.", totals.inference_time),
            ("request_prefill_time_seconds", "From the first step to the first token.", totals.prefill_time),
            ("request_decode_time_seconds", "From the first token to the last.", totals.decode_time),
        ):
            yield self._families.histogram(name, f"{text} In seconds.", histogram.counts())

    def _request_sizes(self) -> Iterator[Metric]:
        totals = self._server.llm.totals
        for name, text, histogram in (
            ("request_prompt_tokens", "Prompt tokens of a request.", totals.num_prompt_tokens),
            ("request_generation_tokens", "Tokens that a request has generated.", totals.num_generation_tokens),
            ("request_params_n", "Answers that a request asks for.", totals.params_n),
            ("request_params_max_tokens", "The bound of tokens that a request sets.", totals.params_max_tokens),
        ):
            yield self._families.histogram(name, text, histogram.counts())

    def _speculation(self) -> Iterator[Metric]:
        """Nothing is drafted, which is what dashboards are told."""
        f = self._families
        for name in ("drafts", "draft_tokens", "accepted_tokens"):
            yield f.counter(f"spec_decode_num_{name}", f"Speculative decoding: {name.replace('_', ' ')}.", 0)
        per_position = "Speculative decoding: accepted tokens by position of the draft."
        yield f.counter("spec_decode_num_accepted_tokens_per_pos", per_position, own=("position",))

    def _http(self) -> Iterator[Metric]:
        f, counts, admission = self._families, self._server.http_counts, self._server.admission
        yield f.gauge("http_requests_in_progress", "HTTP requests under way.", counts.in_progress)
        yield f.gauge("http_admitted_sequences", "Sequences taken in that have not ended.", admission.num_sequences)
        yield f.gauge("http_admission_capacity", "Sequences that are taken in at most.", admission.capacity)
        yield f.counter("http_queue_refusals", "Requests refused as the queue was full.", admission.num_refused)
        refusals = [({"reason": reason}, float(count)) for reason, count in counts.refusals.items()]
        yield f.counter("http_refusals", "Requests refused for the server's sake.", *refusals, own=("reason",))
        responses = [
            ({"method": method, "handler": route, "status": str(status)}, float(count))
            for (method, route, status), count in counts.responses.items()
        ]
        yield f.counter("http_responses", "HTTP responses.", *responses, own=("method", "handler", "status"))
