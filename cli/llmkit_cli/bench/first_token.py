"""The child of `llmkit bench startup`: build an engine, generate one token, say so, report the peak memory.

Usage: python -m llmkit_cli.bench.first_token CONFIG_JSON, where the configuration is that of `EngineConfig`.
Prints a JSON line when the first token is there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def peak_resident_mib() -> float | None:
    """Peak resident memory of this process (VmHWM) in MiB; None where the system does not say."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    for line in status.read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return None


def main() -> None:
    from llmkit import LLM, EngineConfig, SamplingParams
    from llmkit_cli.bench.measure import vocabulary_of
    from llmkit_cli.bench.workloads import workload

    llm = LLM(config=EngineConfig.model_validate_json(sys.argv[1]))
    item = workload("start-32", vocabulary_of(llm))[0]
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": item.prompt}], params, use_tqdm=False)
    print(json.dumps({"first_token": True, "peak_resident_mib": peak_resident_mib()}), flush=True)
    llm.close()


if __name__ == "__main__":
    main()
