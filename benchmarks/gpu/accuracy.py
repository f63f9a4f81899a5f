"""How far a real model's logits are from those in float32: in bfloat16, beside Hugging Face's, and in float8.

    python benchmarks/gpu/accuracy.py tests/data/smollm2_f32.json --few 64 8 1

The file has greedy answers in float32 (prompt_token_ids, output_token_ids). The model reads each with its prompt, all
at once and, with `--few`, so many tokens at a time, as it does where few sequences are decoded: other kernels, and with
up to 8 tokens `fp8` leaves activations as they are. Compared are, over all positions, the distributions of the next
token: mean KL divergence in nats (± the standard error over the answers), largest and mean difference of logits, and
how often the best token is the same. Expected is what transformers computes of the same weights in float32; in the
second table, which has the variants in float8, what llmkit computes in `--dtype`.

On a CPU, TRITON_INTERPRET=1 and `--dtype float32` measure the float8 formats, slowly. Ends with status 1 if
a row failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from differences import Difference, difference
from logits import of_engine, of_hugging_face, opened_model

from llmkit import LLM

VARIANTS: dict[str, dict[str, str]] = {
    "none": {},
    "fp8 weights": {"quantization": "fp8"},
    "fp8 weights, head too": {"quantization": "fp8", "quantization.fp8.lm_head": "fp8"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "fp8 weights and cache": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}
HEAD = """\
| {} | tokens at a time | mean KL, nats | largest, mean difference of logits | same best token |
|---|---|---|---|---|"""


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
    texts = [torch.tensor(item["prompt_token_ids"] + item["output_token_ids"]) for item in items]
    positions = sum(len(ids) for ids in texts)
    print(f"{arguments.model}, {len(texts)} answers, {positions} positions, {arguments.device}\n", flush=True)
    comparison = Comparison(arguments, texts)
    comparison.run()
    sys.exit(1 if comparison.failed else 0)


class Comparison:
    def __init__(self, arguments: argparse.Namespace, texts: list[torch.Tensor]) -> None:
        self._arguments, self._texts = arguments, texts
        self._expected = list(self._peer("float32"))
        self.failed = False

    def run(self) -> None:
        """Print the tables. A variant that fails leaves the others their turn."""
        dtype, variants = self._arguments.dtype, self._arguments.variants
        print(HEAD.format("beside float32"), flush=True)
        self._of_engine("float32", "none", ())
        peer = mine = None
        if dtype != "float32":
            peer = self._row(f"Hugging Face {dtype}", None, lambda: self._peer(dtype))
        for name in variants:
            if name != "none" or dtype != "float32":
                first = self._of_engine(dtype, name, self._arguments.few)
                mine = first if name == "none" else mine
        if peer and mine:
            print(f"\n{judged(mine, peer)}", flush=True)
        in_float8 = [name for name in variants if name != "none"]
        if in_float8 and dtype != "float32":
            print("\n" + HEAD.format(f"beside llmkit {dtype}"), flush=True)
            with self._opened(dtype, "none") as llm:
                self._expected = list(of_engine(llm, self._texts))
            for name in in_float8:
                self._of_engine(dtype, name, ())

    def _of_engine(self, dtype: str, variant: str, few: Sequence[int]) -> Difference | None:
        """The rows of an engine; what came of the whole texts."""
        label = f"llmkit {dtype}" + ("" if variant == "none" else f", {variant}")
        try:
            with self._opened(dtype, variant) as llm:
                rows = [
                    self._row(label, count, lambda count=count: of_engine(llm, self._texts, count))
                    for count in (None, *few)
                ]
        except Exception as error:
            self._failure(label, "", error)
            return None
        return rows[0]

    def _row(self, label: str, few: int | None, logits: Callable[[], Iterator[torch.Tensor]]) -> Difference | None:
        try:
            found = difference(self._expected, logits())
        except Exception as error:
            self._failure(label, str(few or "all"), error)
            return None
        print(f"| {label} | {few or 'all'} | {found.row()} |", flush=True)
        return found

    def _failure(self, label: str, few: str, error: Exception) -> None:
        self.failed = True
        print(f"| {label} | {few} | FAILED {type(error).__name__}: {str(error)[:600]} | | |", flush=True)

    def _opened(self, dtype: str, variant: str) -> LLM:
        return opened_model(self._arguments.model, device=self._arguments.device, dtype=dtype, **VARIANTS[variant])

    def _peer(self, dtype: str) -> Iterator[torch.Tensor]:
        return of_hugging_face(self._arguments.model, self._texts, device=self._arguments.device, dtype=dtype)


def judged(mine: Difference, peer: Difference) -> str:
    """llmkit beside Hugging Face, in words."""
    return (
        f"llmkit's mean KL divergence is {mine.divergence / peer.divergence:.3f} of Hugging Face's and less in "
        f"{mine.fewer(peer)} of {len(mine.each)} answers; its mean difference of logits is {mine.mean / peer.mean:.3f}."
    )


if __name__ == "__main__":
    main()
