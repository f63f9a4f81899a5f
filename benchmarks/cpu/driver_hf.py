"""Hugging Face transformers as a driver, one request at a time: python driver_hf.py FOLDER [--start-only]."""

from __future__ import annotations

import sys
import time

import protocol
import torch
import transformers
from transformers import AutoModelForCausalLM


class Clock(transformers.StoppingCriteria):  # type: ignore[misc]
    """Notes when each token was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()

    @torch.inference_mode()
    def stream(prompt: list[int], count: int) -> list[float]:
        clock, ids = Clock(), torch.tensor([prompt])
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=2,
            eos_token_id=None,
            stopping_criteria=[clock],
        )
        return [start, *clock.times]

    def batch(requests: list[protocol.Request]) -> list[int]:
        return [len(stream(request["prompt"], request["max_tokens"])) - 1 for request in requests]

    stream(protocol.requests_of("start-32")[0]["prompt"], 1)
    if "--start-only" in sys.argv:
        protocol.first_token()
        return
    protocol.serve(stream, batch, lambda: None, f"transformers {transformers.__version__} torch {torch.__version__}")


if __name__ == "__main__":
    main()
