"""What weights and a cache in float8 cost in accuracy: logits of a real model beside those in float32.

    python benchmarks/gpu/fp8_accuracy.py tests/data/smollm2_f32.json

The file has greedy answers in float32 (prompt_token_ids, output_token_ids). The model reads each with its prompt, all
at once and, with `--few`, so many tokens at a time, as it does where few sequences are decoded: then `fp8` leaves
activations as they are. Compared are, over all positions, the distributions of the next token: mean KL divergence from
float32 in nats, largest and mean difference of logits, and how often the best token is the same.

On a CPU, TRITON_INTERPRET=1 and `--dtype float32` measure the same formats, slowly.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from llmkit import LLM
from llmkit.execution.building import KV_DTYPES
from llmkit.layers.attention import Attention
from llmkit.testing.models import ModelTrial

VARIANTS: dict[str, dict[str, str]] = {
    "none": {},
    "fp8 weights": {"quantization": "fp8"},
    "fp8 weights, head too": {"quantization": "fp8", "quantization.fp8.lm_head": "fp8"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "fp8 weights and cache": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--few", type=int, nargs="*", default=[], help="also: read so many tokens at a time")
    parser.add_argument("--sequences", type=int, help="of the file, the first so many")
    arguments = parser.parse_args()
    items = json.loads(arguments.answers.read_text())["items"][: arguments.sequences]
    sequences = [torch.tensor(item["prompt_token_ids"] + item["output_token_ids"]) for item in items]
    positions = sum(len(ids) for ids in sequences)
    print(f"{arguments.model}, {len(sequences)} answers, {positions} positions, {arguments.device}", flush=True)
    expected = list(logits(arguments, "float32", {}, sequences, None))
    print("| | tokens at a time | mean KL, nats | largest, mean difference of logits | same best token |")
    print("|---|---|---|---|---|")
    for name in arguments.variants:
        for few in (None, *arguments.few):
            actual = logits(arguments, arguments.dtype, VARIANTS[name], sequences, few)
            row = compared(expected, actual)
            print(f"| {arguments.dtype}, {name} | {few or 'all'} | {row} |", flush=True)


def logits(
    arguments: argparse.Namespace,
    dtype: str,
    settings: dict[str, str],
    sequences: list[torch.Tensor],
    few: int | None,
) -> Iterator[torch.Tensor]:
    """Of every sequence, float32 [t, vocabulary]."""
    with LLM(
        arguments.model, device=arguments.device, dtype=dtype, max_model_len=256, num_blocks=32, **settings
    ) as llm:
        built = llm.engine.core.executor._worker._built
        layers = [module.layer for module in built.model.modules() if isinstance(module, Attention)]
        kv_dtype = KV_DTYPES[llm.config.kv_cache.dtype]
        for ids in sequences:
            trial = ModelTrial(
                built.model,
                layers,
                built.backend,
                page_size=16,
                num_pages=20,
                dtype=kv_dtype,
                device=llm.config.execution.device,
            )
            yield torch.cat([trial.logits({0: part}) for part in ids.split(few or len(ids))])


def compared(expected: list[torch.Tensor], actual: Iterator[torch.Tensor]) -> str:
    """A row of the table."""
    divergences, largest, differences, same = [], 0.0, [], []
    for right, found in zip(expected, actual, strict=True):
        likely = right.double().log_softmax(-1)
        divergences.append((likely.exp() * (likely - found.double().log_softmax(-1))).sum(-1))
        difference = (found - right).abs()
        largest = max(largest, difference.max().item())
        differences.append(difference.mean(-1))
        same.append(found.argmax(-1) == right.argmax(-1))
    mean = torch.cat(differences).mean().item()
    share = torch.cat(same).double().mean().item()
    return f"{torch.cat(divergences).mean().item():.2e} | {largest:.2f}, {mean:.3f} | {share:.1%}"


if __name__ == "__main__":
    main()
