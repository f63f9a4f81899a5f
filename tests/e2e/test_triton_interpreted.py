"""The reference tokens with attention `triton` on Triton's interpreter, which runs no GPU code.

The two shortest prompts and the first tokens of their answers by default; LLMKIT_DEEP_TESTS=1: more of both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

PROMPTS, TOKENS = (6, 8) if os.environ.get("LLMKIT_DEEP_TESTS") == "1" else (2, 2)
PROGRAM = """
import json, sys
from llmkit import LLM, SamplingParams
model, settings, prompts, count = json.loads(sys.stdin.read())
params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
with LLM(model, **settings) as llm:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


def test_reference_tokens(smollm2_gguf: Path, settings: dict[str, Any], golden: list[dict[str, Any]]) -> None:
    """All prompts in one batch: prefills of several lengths, then decodes."""
    items = sorted(golden, key=lambda item: len(item["prompt_token_ids"]))[:PROMPTS]
    asked = [
        str(smollm2_gguf),
        settings | {"attention.backend": "triton"},
        [item["prompt_token_ids"] for item in items],
        TOKENS,
    ]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(asked),
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    answers = json.loads(ended.stdout.splitlines()[-1])
    assert answers == [item["output_token_ids"][:TOKENS] for item in items]
