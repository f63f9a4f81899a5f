"""llmkit as a driver: python driver_llmkit.py MODEL SETTINGS_JSON [--start-only]."""

from __future__ import annotations

import json
import sys
import time

import protocol

from llmkit import LLM, SamplingParams, __version__


def main() -> None:
    settings = {"max_model_len": 2048, "max_num_seqs": 32, **json.loads(sys.argv[2])}
    llm = LLM(sys.argv[1], **settings)

    def params(count: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)

    def stream(prompt: list[int], count: int) -> list[float]:
        times = [time.perf_counter()]
        times.extend(time.perf_counter() for _ in llm.stream({"prompt_token_ids": prompt}, params(count)))
        return times

    def batch(requests: list[protocol.Request]) -> list[int]:
        prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
        outputs = llm.generate(prompts, [params(request["max_tokens"]) for request in requests], use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    if "--start-only" in sys.argv:
        stream(protocol.requests_of("start-32")[0]["prompt"], 1)
        protocol.first_token()
        return
    batch(protocol.requests_of("start-32"))
    protocol.serve(stream, batch, llm.reset_prefix_cache, f"llmkit {__version__}")


if __name__ == "__main__":
    main()
