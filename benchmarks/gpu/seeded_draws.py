"""Whether a seeded answer depends on what else is computed beside it.

    python benchmarks/gpu/seeded_draws.py tests/data/smollm2_f32.json

The prompts of the file are answered with a seed each, at temperature 0.8, and with top-p 0.9, with top-k 20 and without
either: alone, in batches of 7, and among 64 with other prompts, seeds and ways of sampling. The draws themselves are
a function of logits, seed and position; so answers differ where logits do by so much that another token has the
best score. Printed is how many answers are the same as alone and where the others differ first, by type of the model.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from differences import first_difference

from llmkit import LLM, SamplingParams

WAYS: dict[str, dict[str, Any]] = {"temperature alone": {}, "top-p 0.9": {"top_p": 0.9}, "top-k 20": {"top_k": 20}}
TEMPERATURE = 0.8
MAX_TOKENS = 64
MAX_MODEL_LEN = 256
SMALL, LARGE = 7, 64

Request = tuple[list[int], SamplingParams]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, help="of the file, the first so many")
    arguments = parser.parse_args()
    items = json.loads(arguments.answers.read_text())["items"][: arguments.prompts]
    prompts = [item["prompt_token_ids"] for item in items]
    for dtype in arguments.dtypes:
        with LLM(
            arguments.model,
            device=arguments.device,
            dtype=dtype,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=LARGE,
            num_blocks=LARGE * MAX_MODEL_LEN // 16 + 1,
            enable_prefix_caching=False,
        ) as llm:
            for name, way in WAYS.items():
                compare(llm, f"{dtype}, {name}", [(ids, seeded(i, way)) for i, ids in enumerate(prompts)])


def seeded(seed: int, way: dict[str, Any]) -> SamplingParams:
    return SamplingParams(temperature=TEMPERATURE, seed=seed, max_tokens=MAX_TOKENS, ignore_eos=True, **way)


def compare(llm: LLM, label: str, requests: Sequence[Request]) -> None:
    alone = [answers(llm, [request])[0] for request in requests]
    for size in (SMALL, LARGE):
        report(f"{label}: alone and in a batch of {size}", alone, in_batches(llm, requests, size))


def in_batches(llm: LLM, requests: Sequence[Request], size: int) -> list[list[int]]:
    """Answers to the requests, computed so many at a time, each time filled up with others, in an order of its own."""
    shuffle, found = random.Random(size), [[]] * len(requests)
    mine = min(size, len(requests)) if size == SMALL else size // 2
    for start in range(0, len(requests), mine):
        part = list(range(start, min(start + mine, len(requests))))
        others = [strange(requests[i % len(requests)][0], 1000 + i) for i in range(size - len(part))]
        batch: list[tuple[int | None, Request]] = [(i, requests[i]) for i in part]
        batch += [(None, other) for other in others]
        shuffle.shuffle(batch)
        outputs = answers(llm, [request for _, request in batch])
        for (number, _), tokens in zip(batch, outputs, strict=True):
            if number is not None:
                found[number] = tokens
    return found


def strange(ids: list[int], seed: int) -> Request:
    """A request beside those that are looked at: another seed, length and way of sampling."""
    way = [{}, *WAYS.values(), {"temperature": 0.0}][seed % (len(WAYS) + 2)]
    params = {"temperature": TEMPERATURE, "seed": seed, "max_tokens": 20 + seed % 60, "ignore_eos": True} | way
    return ids[: 1 + seed % len(ids)], SamplingParams(**params)


def answers(llm: LLM, requests: Sequence[Request]) -> list[list[int]]:
    prompts, params = [{"prompt_token_ids": ids} for ids, _ in requests], [each for _, each in requests]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def report(label: str, alone: Sequence[list[int]], beside: Sequence[list[int]]) -> None:
    places = [first_difference(one, other) for one, other in zip(alone, beside, strict=True)]
    differing = [place for place in places if place is not None]
    words = f"; first differences after {sorted(differing)} tokens" if differing else ""
    print(f"{label}: {len(places) - len(differing)} of {len(places)} answers equal{words}", flush=True)


if __name__ == "__main__":
    main()
