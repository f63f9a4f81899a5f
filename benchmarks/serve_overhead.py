"""What HTTP costs: 32 streams over a server beside the same requests in an engine of this process.

    python benchmarks/serve_overhead.py --model MODEL [--workload mixed-32] [--runs 3] [--url NAME=URL ...]
        [--peers FOLDER [--vllm FOLDER] [--llamacpp FILE] [--llamacpp-arguments=-nr]] [-- FLAGS]

Inline: the step loop in this process, every token with its text. `llmkit serve` has the same settings and takes turns
with it, run by run, as the speed of a machine changes within minutes. Then any other OpenAI-compatible server that runs
already (--url llama-server=http://127.0.0.1:8080); all requests at once from this process. Each run has prompts of its
own, of the same lengths, the same for everybody: no server that keeps prefixes has seen them. Prints JSON: for each the
medians over the runs of output tokens/s, TTFT and ITL (median and p99 of all requests), and the ratios to inline.
FLAGS, behind --, are those of `llmkit serve` and of the inline engine, as --name=value.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
from peer_servers import llamacpp_server, vllm_server
from serving import llmkit_server

from llmkit import LLM, SamplingParams
from llmkit.frontend.arguments import input_processor
from llmkit.frontend.output_processor import OutputProcessor, RequestState
from llmkit_cli.bench.workloads import WorkItem, Workload, workload
from llmkit_cli.load.arrivals import arrival_times
from llmkit_cli.load.dataset import LoadItem, body_of
from llmkit_cli.load.figures import figures
from llmkit_cli.load.record import RequestRecord
from llmkit_cli.load.run import LoadRun, run_load
from llmkit_cli.remote.server import RemoteServer

WARM_UP = 4
"""Requests that nobody measures."""

KEYS = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms", "client_load")


def with_other_tokens(items: Workload, run: int, vocab_size: int) -> Workload:
    """The requests for run number `run`: every token is another one, the same wherever it was the same."""
    first, count = 10, vocab_size - 10  # control tokens stand at the beginning
    return [
        WorkItem([first + (token - first + 7919 * run) % count for token in item.prompt], item.max_tokens)
        for item in items
    ]


def inline_run(llm: LLM, items: Workload) -> dict[str, Any]:
    """All requests at once through the engine's own step loop."""
    core, prepared = llm.engine.core, llm.engine.prepared
    inputs, outputs = input_processor(prepared), OutputProcessor(prepared.tokenizer)
    records: list[RequestRecord] = []
    lasts: list[float] = []
    begun, busy = time.perf_counter(), time.process_time()

    def news_for(number: int) -> Any:
        def news(state: RequestState) -> None:
            now, record = time.perf_counter(), records[number]
            count = sum(len(answer.token_ids) for answer in state.take().outputs)
            if record.ttft is None:
                record.ttft = now - record.start
            else:
                record.itls.append(now - lasts[number])
            lasts[number], record.output_tokens, record.e2el = now, record.output_tokens + count, now - record.start

        return news

    for number, item in enumerate(items):
        params = SamplingParams(max_tokens=item.max_tokens, temperature=0, ignore_eos=True, output_kind="delta")
        request = inputs.prepare({"prompt_token_ids": item.prompt}, params)
        records.append(RequestRecord(begun, prompt_tokens=len(item.prompt)))
        lasts.append(begun)
        outputs.add(request, news_for(number))
        core.add(request.engine_request)
    while len(outputs):
        outputs.process(core.step())
    duration = time.perf_counter() - begun
    return figures(LoadRun(records, duration, (time.process_time() - busy) / duration, len(items)))


async def http_runs(url: str, warm_up: Workload, runs: list[Workload]) -> list[dict[str, Any]]:
    """The same runs over HTTP, after one to warm up."""
    results = []
    async with RemoteServer(url) as server:
        model = await server.served_model(None)
        fields = {"temperature": 0, "ignore_eos": True}
        for items in (warm_up, *runs):
            bodies = [
                msgspec.json.encode(body_of(LoadItem(i.prompt, i.max_tokens), "completions", model, fields))
                for i in items
            ]
            run = await run_load(server, "/v1/completions", bodies, arrival_times(len(bodies), float("inf"), 1, 0))
            result = figures(run)
            if result["failed"]:
                raise RuntimeError(f"{result['failed']} requests have failed at {url}: {result['errors']}")
            results.append(result)
    return results[1:]


def medians(results: list[dict[str, Any]]) -> dict[str, float]:
    return {key: round(statistics.median(result[key] for result in results), 2) for key in KEYS}


def ratios(one: dict[str, float], inline: dict[str, float]) -> dict[str, float]:
    """Without those of times that there are none of, as with a single token."""
    return {key: round(one[key] / inline[key], 3) for key in KEYS if key != "client_load" and inline[key]}


def others(arguments: argparse.Namespace) -> Iterator[tuple[str, AbstractContextManager[str]]]:
    """Servers beside llmkit's: what each is called, and a context with its URL."""
    for text in arguments.url:
        name, url = text.split("=", 1)
        yield name, nullcontext(url)
    if arguments.vllm is not None:
        yield "vllm", vllm_server(arguments.peers, arguments.vllm)
    if arguments.llamacpp is not None:
        flags = shlex.split(arguments.llamacpp_arguments)
        yield "llama-server", llamacpp_server(arguments.peers, arguments.llamacpp, flags)


def main() -> None:
    parser = argparse.ArgumentParser(description="Streams over HTTP beside the inline engine.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", default="mixed-32")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--url", action="append", default=[], metavar="NAME=URL", help="another server that runs")
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="where the other engines are installed")
    parser.add_argument("--vllm", type=Path, metavar="FOLDER", help="model for vLLM's server")
    parser.add_argument("--llamacpp", type=Path, metavar="FILE", help="model (GGUF) for llama.cpp's server")
    parser.add_argument("--llamacpp-arguments", default="", help="more for llama-server, such as =-nr")
    parser.add_argument("flags", nargs="*", help="settings as flags, behind --")
    arguments = parser.parse_args()
    if arguments.peers is None and (arguments.vllm or arguments.llamacpp):
        parser.error("--vllm and --llamacpp need --peers")
    settings = dict(flag.removeprefix("--").replace("-", "_").split("=", 1) for flag in arguments.flags)
    inline_results: list[dict[str, Any]] = []
    served_results: list[dict[str, Any]] = []
    with LLM(arguments.model, **settings) as llm, llmkit_server(arguments.model, arguments.flags) as running:
        vocab_size = int(llm.engine.prepared.source.config["vocab_size"])
        items = workload(arguments.workload, vocab_size)
        warm_up, *runs = (with_other_tokens(items, run, vocab_size) for run in range(1 + arguments.runs))
        warm_up = warm_up[:WARM_UP]
        inline_run(llm, warm_up)
        for run in runs:
            inline_results.append(inline_run(llm, run))
            served_results += asyncio.run(http_runs(running.url, warm_up, [run]))
    inline, served = medians(inline_results), medians(served_results)
    result: dict[str, Any] = {"inline": inline, "llmkit serve": {**served, "ratios": ratios(served, inline)}}
    for name, server in others(arguments):
        with server as url:
            other = medians(asyncio.run(http_runs(url, warm_up, runs)))
        result[name] = {**other, "ratios": ratios(other, inline)}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
