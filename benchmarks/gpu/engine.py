"""The engine on a GPU with dummy weights of real shapes: time per output token by batch size, and `nano`.

    python benchmarks/gpu/engine.py qwen3-0.6b llama-3.1-8b --json result.json

Time per output token is the difference between answers of 129 tokens and of 1, over 128. The limit of batch 1 to 64 is
reading every weight, and every key and value of the batch's mean context, once a step, at the rate at which this
machine copies memory. Every workload runs once before it is timed, which captures its graphs. temperature 0.6, and what
`--sampling` names beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from llmkit import LLM, SamplingParams
from llmkit_cli.bench.shapes import SHAPES, write_shape
from llmkit_cli.bench.workloads import WorkItem, workload

BATCHES = (1, 8, 64, 256)
SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "truncated": {"top_k": 20, "top_p": 0.95},
    "nucleus": {"top_p": 0.9},
    "penalised": {"repetition_penalty": 1.1, "presence_penalty": 0.5},
    "reported": {"logprobs": 5},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", choices=list(SHAPES))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--sampling", nargs="+", choices=list(SAMPLING), default=["plain"])
    parser.add_argument("--skip-nano", action="store_true")
    parser.add_argument("--profile", type=int, help="print where a decode step of so many rows spends its time")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies {rate / 1e12:.2f} TB/s", flush=True)
    results = {shape: measured(shape, rate, arguments) for shape in arguments.shapes}
    if arguments.json:
        arguments.json.write_text(json.dumps({"copy_bytes_per_s": rate, "shapes": results}, indent=1))


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


def measured(shape: str, rate: float, arguments: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"batches": {}}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        llm = LLM(
            str(write_shape(shape, Path(folder))),
            load_format="dummy",
            skip_tokenizer=True,
            device="cuda",
            max_model_len=4096,
            max_num_seqs=256,
            enable_prefix_caching=False,
        )
        with llm:
            seconds(llm, workload("batch-1", SHAPES[shape]["vocab_size"]), 1)
            result["first_token_s"] = time.perf_counter() - start
            print(f"{shape}: first token after {result['first_token_s']:.1f} s", flush=True)
            for kind in arguments.sampling:
                for batch in arguments.batches:
                    name = str(batch) if kind == "plain" else f"{batch} {kind}"
                    result["batches"][name] = per_token(llm, shape, batch, kind, rate, arguments.runs)
            if arguments.profile:
                profile(llm, shape, arguments.profile)
            if not arguments.skip_nano:
                result["nano"] = nano(llm, shape)
    torch.cuda.empty_cache()
    return result


def per_token(llm: LLM, shape: str, batch: int, kind: str, rate: float, runs: int) -> dict[str, float]:
    items = workload(f"batch-{batch}", SHAPES[shape]["vocab_size"])
    seconds(llm, items, 129, kind)
    times = [(seconds(llm, items, 129, kind) - seconds(llm, items, 1, kind)) / 128 * 1e3 for _ in range(runs)]
    limit = step_bytes(SHAPES[shape], batch, 128 + 64) / rate * 1e3
    median = statistics.median(times)
    spread = f"[{min(times):.2f}-{max(times):.2f}]"
    print(
        f"  batch {batch:3} {kind}: {median:6.2f} ms a token {spread}, limit {limit:.2f}, {limit / median:.0%}",
        flush=True,
    )
    return {"ms": median, "least": min(times), "most": max(times), "limit_ms": limit}


def nano(llm: LLM, shape: str) -> dict[str, float]:
    items = workload("nano", SHAPES[shape]["vocab_size"])
    tokens = sum(item.max_tokens for item in items)
    first, second = seconds(llm, items), seconds(llm, items)
    print(f"  nano: {tokens / first:.0f} tok/s with captures, then {tokens / second:.0f}", flush=True)
    return {"first_tok_s": tokens / first, "tok_s": tokens / second}


def seconds(llm: LLM, items: list[WorkItem], max_tokens: int | None = None, kind: str = "plain") -> float:
    more = SAMPLING[kind]
    params = [
        SamplingParams(temperature=0.6, max_tokens=max_tokens or item.max_tokens, ignore_eos=True, **more)
        for item in items
    ]
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": item.prompt} for item in items], params, use_tqdm=False)
    elapsed = time.perf_counter() - start
    for output, wanted in zip(outputs, params, strict=True):
        assert len(output.outputs[0].token_ids) == wanted.max_tokens, output.outputs[0]
    return elapsed


def step_bytes(config: dict[str, Any], rows: int, context: int) -> int:
    """Bytes of bfloat16 that a decode step must read: weights, and keys and values of `rows` contexts."""
    hidden, layers, size = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layer = hidden * size * (2 * heads + 2 * kv_heads) + 3 * hidden * config["intermediate_size"]
    weights = layers * layer + hidden * config["vocab_size"]
    return 2 * (weights + rows * context * layers * 2 * kv_heads * size)


def profile(llm: LLM, shape: str, batch: int) -> None:
    items = workload(f"batch-{batch}", SHAPES[shape]["vocab_size"])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        seconds(llm, items, 33)
    print(record.key_averages().table(sort_by="cuda_time_total", row_limit=22, max_name_column_width=60))


if __name__ == "__main__":
    main()
