"""The engine on a GPU with dummy weights of real shapes: all rows of `rows.py`.

    python benchmarks/gpu/engine.py qwen3-0.6b llama-3.1-8b --jsonl runs.jsonl

Beside times per output token stands the limit: reading every weight, and every key and value of the batch's mean
context, once a step, at the rate at which this machine copies memory. `--sampling` adds other ways of sampling, one
difference of times each. `--variants` runs the same with weights or cache in float8, one after the other.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rows import BATCHES, MAX_MODEL_LEN, ROWS, TEMPERATURE, first_token, measure, per_token, sink

from llmkit import LLM, SamplingParams
from llmkit_cli.bench.shapes import SHAPES, write_shape
from llmkit_cli.bench.workloads import WorkItem, workload

SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "truncated": {"top_k": 20, "top_p": 0.95},
    "nucleus": {"top_p": 0.9},
    "penalised": {"repetition_penalty": 1.1, "presence_penalty": 0.5},
    "reported": {"logprobs": 5},
}


VARIANTS: dict[str, dict[str, str]] = {
    "bf16": {},
    "fp8": {"quantization": "fp8"},
    "kv8": {"kv_cache_dtype": "fp8"},
    "fp8-kv8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}


class Llmkit:
    def __init__(self, llm: LLM, sampling: dict[str, Any] | None = None) -> None:
        self._llm, self._sampling = llm, sampling or {}

    def seconds(self, items: list[WorkItem], max_tokens: int | None = None) -> float:
        params = [
            SamplingParams(
                temperature=TEMPERATURE, max_tokens=max_tokens or item.max_tokens, ignore_eos=True, **self._sampling
            )
            for item in items
        ]
        start = time.perf_counter()
        outputs = self._llm.generate([{"prompt_token_ids": item.prompt} for item in items], params, use_tqdm=False)
        elapsed = time.perf_counter() - start
        for output, wanted in zip(outputs, params, strict=True):
            assert len(output.outputs[0].token_ids) == wanted.max_tokens, output.outputs[0]
        return elapsed

    def forget(self) -> None:
        assert self._llm.reset_prefix_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", choices=list(SHAPES))
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=ROWS)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=["bf16"])
    parser.add_argument("--sampling", nargs="+", choices=list(SAMPLING), default=[])
    parser.add_argument("--profile", type=int, help="print where a decode step of so many rows spends its time")
    parser.add_argument("--jsonl", type=Path)
    arguments = parser.parse_args()
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies {rate / 1e12:.2f} TB/s", flush=True)
    for shape in arguments.shapes:
        for variant in arguments.variants:
            measured(shape, variant, rate, arguments)


def copy_rate() -> float:
    """Bytes a second, read and written."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.numel() / statistics.median(times)


@contextmanager
def opened(shape: str, settings: dict[str, str] | None = None) -> Iterator[LLM]:
    """An engine on the GPU with dummy weights of that shape, closed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            str(write_shape(shape, Path(folder))),
            load_format="dummy",
            skip_tokenizer=True,
            device="cuda",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=256,
            **(settings or {}),
        )
        with llm:
            yield llm


def measured(shape: str, variant: str, rate: float, arguments: argparse.Namespace) -> None:
    settings = VARIANTS[variant]
    for batch in BATCHES:
        limit = step_bytes(SHAPES[shape], batch, 128 + 64, settings) / rate * 1e3
        print(f"  limit {shape} {variant} tpot-{batch}: {limit:.3f} ms", flush=True)
    take = sink("llmkit" if variant == "bf16" else f"llmkit-{variant}", shape, arguments.jsonl)
    start = time.perf_counter()
    with opened(shape, settings) as llm:
        engine = Llmkit(llm)
        first_token(engine, shape)
        if "start" in arguments.rows:
            take("start", time.perf_counter() - start)
        measure(engine, shape, arguments.rows, take)
        for kind in arguments.sampling:
            sampled(Llmkit(llm, SAMPLING[kind]), shape, kind)
            if arguments.profile:
                profile(engine, shape, arguments.profile)
    torch.cuda.empty_cache()


def sampled(engine: Llmkit, shape: str, kind: str) -> None:
    for batch in BATCHES:
        items = workload(f"batch-{batch}", SHAPES[shape]["vocab_size"])
        engine.seconds(items, 129)
        (seconds,) = per_token(engine, items, runs=1)
        print(f"  {kind}, {batch}: {seconds * 1e3:.2f} ms a token", flush=True)


def step_bytes(config: dict[str, Any], rows: int, context: int, settings: dict[str, str]) -> int:
    """Bytes that a decode step must read: weights, and keys and values of `rows` contexts; two for each number but
    those that `settings` have in float8."""
    hidden, layers, size = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layer = hidden * size * (2 * heads + 2 * kv_heads) + 3 * hidden * config["intermediate_size"]
    of_weight = 1 if "quantization" in settings else 2
    of_cache = 1 if "kv_cache_dtype" in settings else 2
    weights = of_weight * layers * layer + 2 * hidden * config["vocab_size"]
    return weights + of_cache * rows * context * layers * 2 * kv_heads * size


def profile(engine: Llmkit, shape: str, batch: int) -> None:
    items = workload(f"batch-{batch}", SHAPES[shape]["vocab_size"])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        engine.seconds(items, 33)
    print(record.key_averages().table(sort_by="cuda_time_total", row_limit=22, max_name_column_width=60))


if __name__ == "__main__":
    main()
