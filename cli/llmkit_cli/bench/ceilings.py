"""The two ceilings of a machine, measured on the spot: reading memory, and multiplying matrices."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmkit import LLM


@dataclass(frozen=True)
class Ceilings:
    """read_gb_s: bytes read from memory per second, / 1e9. matmul_gflop_s: of a large square product in `dtype`."""

    read_gb_s: float
    matmul_gflop_s: float
    dtype: str


def measure_ceilings(device_name: str, dtype_name: str) -> Ceilings:
    """Best of several short runs; about half a second on a CPU."""
    import torch

    device, dtype = torch.device(device_name), getattr(torch, dtype_name)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def best(run: Callable[[], object], repeats: int) -> float:
        times = []
        for _ in range(repeats):
            wait()
            start = time.perf_counter()
            run()
            wait()
            times.append(time.perf_counter() - start)
        return min(times)

    size, side = (2**28, 1024) if device.type == "cpu" else (2**32, 8192)
    data = torch.ones(size // 4, dtype=torch.float32, device=device)
    read = size / best(data.sum, 5) / 1e9
    del data
    a = torch.ones(side, side, dtype=dtype, device=device)
    b = torch.ones(side, side, dtype=dtype, device=device)
    product = 2 * side**3 / best(lambda: a @ b, 7) / 1e9
    return Ceilings(round(read, 1), round(product, 1), dtype_name)


def against_ceilings(ceilings: Ceilings, llm: LLM, figures: dict[str, Any]) -> dict[str, Any]:
    """How far the figures are from what reading every weight once a step, or multiplying at full speed, would allow.

    A step reads `weight_bytes`, and a token takes two operations per parameter of the layers. The KV cache and the
    attention are left out, so the true limit is a little lower. Of a throughput both fractions are given: what it
    reaches of the reading and of the multiplying; a machine that is used well is near 1 in one of them.
    """
    memory = llm.engine.report.memory
    limits: dict[str, Any] = {
        "read_gb_s": ceilings.read_gb_s,
        f"matmul_gflop_s ({ceilings.dtype})": ceilings.matmul_gflop_s,
        "weight_bytes": memory.weights,
    }
    if "decode_tok_s" in figures:
        limit = ceilings.read_gb_s * 1e9 / memory.weights
        limits["decode_limit_tok_s"] = round(limit, 1)
        limits["decode_fraction"] = round(figures["decode_tok_s"]["median"] / limit, 3)
    if "prefill_tok_s" in figures:
        limit = ceilings.matmul_gflop_s * 1e9 / (2 * layer_parameters(llm.engine.prepared.source.config))
        limits["prefill_limit_tok_s"] = round(limit, 1)
        limits["prefill_fraction"] = round(figures["prefill_tok_s"]["median"] / limit, 3)
    if "steps_s" in figures and "total_tok_s" in figures:
        read = figures["steps_s"]["median"] * memory.weights
        limits["read_fraction"] = round(read / (ceilings.read_gb_s * 1e9), 3)
        multiplied = figures["total_tok_s"]["median"] * 2 * layer_parameters(llm.engine.prepared.source.config)
        limits["matmul_fraction"] = round(multiplied / (ceilings.matmul_gflop_s * 1e9), 3)
    return limits


def layer_parameters(config: dict[str, Any]) -> int:
    """Weights in the linear layers of a dense decoder, by its configuration; head and embedding left out."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_size = config.get("head_dim") or hidden // heads
    attention = hidden * head_size * (2 * heads + 2 * kv_heads)
    return int(layers * (attention + 3 * hidden * config["intermediate_size"]))
