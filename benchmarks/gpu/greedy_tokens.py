"""Greedy answers of every attention backend, with and without graphs, with steps launched ahead and without.

    python benchmarks/gpu/greedy_tokens.py tests/data/smollm2_f32.json --dtypes float32 bfloat16
    python benchmarks/gpu/greedy_tokens.py tests/data/smollm2_f32.json --shape qwen3-0.6b --dtypes bfloat16

Answers are those of the first engine, token for token, except where the two best logits lie so close together that
rounding decides. How close that is, is measured: by how much the type changes the lead of the best token over the
second at any place of these answers, llmkit's own logits beside those in float32; in float32 it is 1e-3, and the file's
answers are expected, with the file's leads. At the first place where an answer differs, the two tokens must be that
close in float32; what follows is another text. Ends with status 1 if one is not.

With --shape: random prompts and a model of that shape with dummy weights instead, for backends that do not take the
model's heads. A backend that does not take the model is left out, with its reason.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from differences import first_difference, margin_noise
from logits import MAX_MODEL_LEN, of_llmkit

from llmkit import LLM, SamplingParams
from llmkit.errors import PluginError
from llmkit_cli.bench.shapes import SHAPES, write_shape

TIE = 1e-3
"""Logits in float32 so close together are equal."""

BACKENDS: dict[str, dict[str, Any]] = {
    "triton": {},
    "torch": {},
    "flash_attn": {"attention.flash_attn.least_tokens": 1},  # wherever the library can be asked
    "flashinfer": {},
}
MAX_TOKENS = 64


@dataclass
class Subject:
    """A model and prompts. expected: answers in float32; leads: of the best token over the second at each place."""

    model: str
    prompts: list[list[int]]
    settings: dict[str, Any] = field(default_factory=dict)
    expected: list[list[int]] | None = None
    leads: list[list[float]] | None = None


@dataclass
class Answers:
    """Of one engine. backend, mode: what it was."""

    backend: str
    mode: str
    tokens: list[list[int]]

    @property
    def label(self) -> str:
        return f"{self.backend}, {self.mode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS))
    parser.add_argument("--prompts", type=int, help="of the file, the first so many")
    arguments = parser.parse_args()
    wrong = False
    with subject_of(arguments) as subject:
        for dtype in arguments.dtypes:
            wrong |= compared(subject, dtype, arguments)
    sys.exit(int(wrong))


@contextmanager
def subject_of(arguments: argparse.Namespace) -> Iterator[Subject]:
    items = json.loads(arguments.answers.read_text())["items"][: arguments.prompts]
    if arguments.shape is None:
        yield Subject(
            arguments.model,
            [item["prompt_token_ids"] for item in items],
            {},
            [item["output_token_ids"] for item in items],
            [item["top2_margin"] for item in items],
        )
        return
    draw, vocabulary = random.Random(5), SHAPES[arguments.shape]["vocab_size"]
    prompts = [[draw.randrange(10, vocabulary) for _ in range(draw.randint(5, 120))] for _ in items]
    with tempfile.TemporaryDirectory() as folder:
        path = str(write_shape(arguments.shape, Path(folder)))
        yield Subject(path, prompts, {"load_format": "dummy", "skip_tokenizer": True})


def compared(subject: Subject, dtype: str, arguments: argparse.Namespace) -> bool:
    """Print what came of one type; whether anything is wrong. A backend that fails leaves the others their turn."""
    print(f"\n{arguments.shape or subject.model}, {dtype}, {len(subject.prompts)} prompts", flush=True)
    closeness: Closeness | None = None
    wrong: list[str] = []
    for backend in arguments.backends:
        runs: list[Answers] = []
        try:
            runs.extend(answered(subject, backend, dtype, arguments.device))  # keeps what came before an error
        except Exception as error:
            refused = isinstance(error, PluginError) and "cannot be used" in str(error)
            wrong += [] if refused else [backend]
            word = "left out" if refused else f"FAILED {type(error).__name__}"
            print(f"  {backend}: {word}: {str(error)[:1500]}", flush=True)
        if runs and closeness is None:
            given = subject.expected if dtype == "float32" else None
            closeness = Closeness(subject, given or runs[0].tokens, dtype, arguments.device)
        wrong += [run.label for run in runs if closeness is None or not closeness.judge(run)]
    print(f"  WRONG: {'; '.join(wrong)}" if wrong else "  all within it", flush=True)
    return bool(wrong) or closeness is None


def answered(subject: Subject, backend: str, dtype: str, device: str) -> Iterator[Answers]:
    """By engines with that backend: ahead and waiting, each with graphs, where it has any, and without."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos="load_format" in subject.settings)
    prompts = [{"prompt_token_ids": ids} for ids in subject.prompts]
    for ahead in (True, False) if device != "cpu" else (False,):
        start = time.perf_counter()
        settings: dict[str, Any] = {"attention.backend": backend, "async_scheduling": ahead, "dtype": dtype}
        settings |= BACKENDS.get(backend, {})
        with LLM(
            subject.model,
            device=device,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max(32, len(prompts)),
            num_blocks=len(prompts) * MAX_MODEL_LEN // 16 + 1,
            enable_prefix_caching=False,
            **subject.settings,
            **settings,
        ) as llm:
            started = time.perf_counter() - start
            runner = llm.engine.core.executor._worker._runner
            for graphs in (True, False):
                if graphs and getattr(runner, "_graphs", None) is None:
                    continue
                if not graphs and hasattr(runner, "_graphs"):
                    runner._graphs = None
                outputs = llm.generate(prompts, params, use_tqdm=False)
                mode = f"{'graphs' if graphs else 'no graphs'}, {'ahead' if ahead else 'waiting'}"
                yield Answers(backend, mode, [list(output.outputs[0].token_ids) for output in outputs])
        print(f"  {backend}: started in {started:.1f} s", flush=True)
        gc.collect()


class Closeness:
    """Says of answers whether they are the expected ones, ties aside."""

    def __init__(self, subject: Subject, expected: list[list[int]], dtype: str, device: str) -> None:
        self._subject, self._expected = subject, expected
        self._leads = subject.leads if dtype == "float32" and expected is subject.expected else None
        self._logits: list[torch.Tensor] = []
        self._limit = TIE
        if self._leads is not None:
            return
        texts = [torch.tensor(p + answer) for p, answer in zip(subject.prompts, expected, strict=True)]
        self._logits = list(of_llmkit(subject.model, texts, device=device, dtype="float32", **subject.settings))
        if dtype != "float32":
            of_type = of_llmkit(subject.model, texts, device=device, dtype=dtype, **subject.settings)
            noise = margin_noise(self._logits, of_type)
            self._limit = noise.max().item()
            print(
                f"  {dtype} changes the lead of the best token by {noise.mean():.2g} in the mean, {self._limit:.2g} at "
                f"most, over {len(noise)} places",
                flush=True,
            )

    def judge(self, run: Answers) -> bool:
        """Print a line; whether all differences are ties."""
        leads = []
        for number, (right, found) in enumerate(zip(self._expected, run.tokens, strict=True)):
            place = first_difference(right, found)
            if place is not None:
                leads.append(self._lead(number, place, right, found))
        least = f"; where they differ first, the tokens are at most {max(leads):.2g} apart" if leads else ""
        print(
            f"  {run.label}: {len(run.tokens) - len(leads)} of {len(run.tokens)} answers equal{least}",
            flush=True,
        )
        return all(lead <= self._limit for lead in leads)

    def _lead(self, number: int, place: int, right: list[int], found: list[int]) -> float:
        """How far apart the two tokens are in float32; infinite if one of the answers has ended there."""
        if place >= min(len(right), len(found)):
            return float("inf")
        if self._leads is not None:
            return self._leads[number][place]
        logits = self._logits[number][len(self._subject.prompts[number]) + place - 1]
        return abs(logits[right[place]] - logits[found[place]]).item()


if __name__ == "__main__":
    main()
