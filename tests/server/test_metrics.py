"""/metrics over a real engine of random weights, and /health over one that hangs."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmkit import AsyncLLM, OutputKind, SamplingParams
from llmkit.engine.async_client import EngineHealth
from llmkit.engine.core import EngineCore
from llmkit_server.app import create_app
from llmkit_server.metrics import engine_watch

SETTINGS = {
    "load_format": "dummy",
    "dtype": "float32",
    "num_blocks": 20,
    "max_num_seqs": 8,
    "max_model_len": 256,
    "num_threads": 1,
    "attention.backend": "torch",
    "execution.kernels": "torch",
    "overrides": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": 5,
    },
}
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, seed=1, output_kind=OutputKind.DELTA)

NAMES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "engine_sleep_state",
    "cache_config_info",
    "lora_requests_info",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_sum",
    "request_time_per_output_token_seconds_count",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_inference_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "iteration_tokens_total_bucket",
    "request_params_n_bucket",
    "request_params_max_tokens_bucket",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "plugin_call_seconds_count",
    "plugin_call_seconds_sum",
    "engine_restarts_total",
    "http_refusals_total",
    "http_queue_refusals_total",
)


class Metrics:
    """The samples of one scrape; labels model_name and engine are checked and left out."""

    def __init__(self, text, prefix="llmkit:", model="tiny"):
        self.values = {}
        self.types = {}
        for family in text_string_to_metric_families(text):
            assert family.name.startswith(prefix), family
            self.types[family.name.removeprefix(prefix)] = family.type
            for sample in family.samples:
                labels = dict(sample.labels)
                assert (labels.pop("model_name"), labels.pop("engine")) == (model, "0"), sample
                key = (sample.name.removeprefix(prefix), *sorted(labels.items()))
                assert key not in self.values, key
                self.values[key] = sample.value

    def __call__(self, name, **labels):
        return self.values[name, *sorted(labels.items())]


@asynccontextmanager
async def server(**settings):
    """(llm, client, scrape)"""
    server_settings = {"served_model_names": ("tiny",), "access_log": False} | settings.pop("server", {})
    async with AsyncLLM(process=False, server=server_settings, **SETTINGS | settings) as llm:
        transport = httpx.ASGITransport(create_app(llm))
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:

            async def scrape(**arguments):
                response = await client.get("/metrics")
                assert response.status_code == 200
                assert response.headers["content-type"].startswith("text/plain")
                return Metrics(response.text, **arguments)

            yield llm, client, scrape


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def read(llm, prompt, **params):
    return [output async for output in llm.generate(prompt, msgspec.structs.replace(PARAMS, **params))][-1]


def test_every_name_is_there_and_counts():
    async def main():
        async with server() as (llm, _, scrape):
            before = await scrape()
            assert not {name for name in NAMES if name not in {key[0] for key in before.values}}
            assert before.types["spec_decode_num_accepted_tokens_per_pos"] == "counter"
            await asyncio.gather(*(read(llm, [i] * 20) for i in range(3)), read(llm, [7] * 5, n=2))
            return before, await scrape()

    before, after = run(main())
    assert before("request_success_total", finished_reason="length") == 0
    assert after("request_success_total", finished_reason="length") == 4  # requests, not answers
    assert after("prompt_tokens_total") == 65  # once, whatever n
    assert after("prompt_tokens_cached_total") == 0
    assert after("generation_tokens_total") == 5 * 8
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_inference_time_seconds",
        "request_decode_time_seconds",
        "request_time_per_output_token_seconds",
        "request_params_n",
        "request_params_max_tokens",
        "request_prompt_tokens",
        "request_generation_tokens",
    ):
        assert after(f"{name}_count") == after(f"{name}_bucket", le="+Inf") == 4, name
    assert after("inter_token_latency_seconds_count") == 5 * 7
    assert after("request_generation_tokens_sum") == 40
    assert after("request_params_n_sum") == 5
    assert after("iteration_tokens_total_sum") == 65 + 5 * 7 + 1  # one position of the second answer's fork
    assert after("iteration_tokens_total_count") == after("engine_steps_total")
    phases = [after(f"request_{name}_time_seconds_sum") for name in ("queue", "prefill", "decode")]
    assert sum(phases) == pytest.approx(after("e2e_request_latency_seconds_sum"), rel=0.2)
    assert after("num_requests_running") == after("num_requests_waiting") == after("kv_cache_usage_perc") == 0
    assert after("engine_sleep_state", sleep_state="awake") == 1
    (info,) = [dict(labels for labels in key[1:]) for key in after.values if key[0] == "cache_config_info"]
    assert (info["block_size"], info["num_gpu_blocks"]) == ("16", str(SETTINGS["num_blocks"] - 1))
    assert any(key[0] == "plugin_call_seconds_count" and value > 0 for key, value in after.values.items())


def test_the_prefix_may_be_another_one():
    async def main():
        async with server(server={"metrics_prefix": "vllm"}) as (_, client, scrape):
            assert (await scrape(prefix="vllm:"))("num_requests_running") == 0
            response = await client.get("/metrics", headers={"accept": "application/openmetrics-text"})
            assert response.headers["content-type"].startswith("application/openmetrics-text")
            assert response.text.endswith("# EOF\n")

    run(main())


def test_preemptions_count_no_prefix_hits_and_cached_tokens_are_whole_blocks(events):
    """B66, over HTTP: prompts that are preempted and computed again are not hits."""
    draw = random.Random(66)
    prompts = [[draw.randrange(6, 512) for _ in range(60)] for _ in range(8)]

    async def main():
        async with server() as (llm, client, scrape):

            async def ask(prompt, **fields):
                body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "temperature": 0, **fields}
                response = await client.post("/v1/completions", json=body)
                assert response.status_code == 200, response.text
                return response

            answers = await asyncio.gather(*(ask(prompt) for prompt in prompts))
            first = await scrape()
            assert await llm.reset_prefix_cache()
            await ask(prompts[0], max_tokens=1)
            again = await ask(prompts[0], max_tokens=1)
            options = {"include_usage": True}
            streamed = await ask(prompts[0], max_tokens=1, stream=True, stream_options=options)
            return answers, first, again, streamed, await scrape()

    answers, first, again, streamed, last = run(main())
    assert first("num_preemptions_total") > 0
    assert first("prefix_cache_hits_total") == first("prompt_tokens_cached_total") == 0
    assert first("prefix_cache_queries_total") == first("prompt_tokens_total") == 480
    for answer in answers:
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    usages = [again.json()["usage"], events(streamed)[-1]["usage"]]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [48, 48]  # 3 blocks of 16, of 60
    assert last("prefix_cache_hits_total") == last("prompt_tokens_cached_total") == 96
    assert last("generation_tokens_total") == 8 * 40 + 3


def test_requests_that_are_given_up_or_refused():
    async def main():
        async with server() as (llm, client, scrape):
            stream = llm.generate([1, 2, 3], msgspec.structs.replace(PARAMS, max_tokens=200))
            await anext(stream)
            await stream.aclose()
            with pytest.raises(TimeoutError):
                await anext(llm.generate([1], PARAMS, timeout=0))
            await client.get("/v1/nothing")
            for _ in range(2):
                await client.post("/v1/completions", json={"prompt": [1], "max_tokens": -1})
            return await scrape()

    after = run(main())
    assert after("request_success_total", finished_reason="abort") == 2
    assert after("time_to_first_token_seconds_count") == 1
    assert after("e2e_request_latency_seconds_count") == 2
    assert after("prompt_tokens_total") == 3
    assert after("http_responses_total", method="POST", handler="/v1/completions", status="400") == 2
    assert after("http_responses_total", method="GET", handler="other", status="404") == 1
    assert after("http_requests_in_progress") == 1  # the scrape itself


def test_refusals_are_counted(serve):
    served = serve(api_keys=("secret",), max_queue=0)
    served.post("/v1/completions", {"prompt": "a"})
    served.post("/v1/completions", {"prompt": "a"}, headers={"x-api-key": "wrong"})
    served.engine.health = EngineHealth(alive=True, ready=False, num_restarts=3)
    served.post("/v1/completions", {"prompt": "a"}, headers={"x-api-key": "secret"})
    metrics = Metrics(served.call("GET", "/metrics").text, model="models/tiny")
    assert metrics("http_refusals_total", reason="unauthorized") == 2
    assert metrics("http_refusals_total", reason="unavailable") == 1
    assert metrics("http_admission_capacity") == 4
    assert metrics("engine_restarts_total") == 3


def test_a_core_that_hangs_is_told_from_a_busy_one(monkeypatch):
    """/health says that it is stuck, and /metrics answers all the same."""
    gate = threading.Event()
    step = EngineCore.step

    def hanging(self):
        assert gate.wait(30)
        return step(self)

    monkeypatch.setattr(EngineCore, "step", hanging)
    monkeypatch.setattr(engine_watch, "PATIENCE_S", 0.01)

    async def main():
        async with server(server={"stuck_after_s": 0.05}) as (llm, client, scrape):
            assert (await client.get("/health")).status_code == 200
            request = asyncio.create_task(read(llm, [1, 2, 3]))
            while (health := await client.get("/health")).status_code == 200:
                await asyncio.sleep(0.01)
            metrics = await scrape()
            gate.set()
            await request
            return health, metrics, await client.get("/health")

    health, metrics, after = run(main())
    assert health.status_code == 503
    assert "stuck" in health.json()["error"]["message"]
    assert metrics("num_requests_running") == 0  # what the engine said last
    assert after.status_code == 200
