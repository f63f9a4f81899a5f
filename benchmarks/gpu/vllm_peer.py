"""vLLM on the rows of `rows.py`; run where vLLM is installed, one shape a process.

python benchmarks/gpu/vllm_peer.py qwen3-0.6b --jsonl peer.jsonl
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from rows import MAX_MODEL_LEN, ROWS, TEMPERATURE, first_token, measure, sink

from llmkit_cli.bench.shapes import SHAPES, write_shape
from llmkit_cli.bench.workloads import WorkItem


class Vllm:
    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def seconds(self, items: list[WorkItem], max_tokens: int | None = None) -> float:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": item.prompt} for item in items]
        params = [
            SamplingParams(
                temperature=TEMPERATURE,
                max_tokens=max_tokens or item.max_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            for item in items
        ]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - start
        for output, wanted in zip(outputs, params, strict=True):
            assert len(output.outputs[0].token_ids) == wanted.max_tokens
        return elapsed

    def forget(self) -> None:
        self._llm.reset_prefix_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--jsonl", type=Path)
    arguments = parser.parse_args()
    take = sink("vllm", arguments.shape, arguments.jsonl)
    with tempfile.TemporaryDirectory() as folder:
        from vllm import LLM

        start = time.perf_counter()
        llm = LLM(
            model=str(write_shape(arguments.shape, Path(folder))),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=MAX_MODEL_LEN,
            gpu_memory_utilization=0.8,
            enable_prefix_caching=True,
        )
        engine = Vllm(llm)
        first_token(engine, arguments.shape)
        if "start" in arguments.rows:
            take("start", time.perf_counter() - start)
        measure(engine, arguments.shape, arguments.rows, take)


if __name__ == "__main__":
    main()
