"""Rows in which only a token changed cost runner and sampler no Python work of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import llmkit
from llmkit import LLM
from llmkit.requests.message import EngineRequest
from llmkit.requests.sampling_params import SamplingParams

WATCHED = tuple(str(Path(llmkit.__file__).parent / part) for part in ("execution", "sampling"))
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


def interpreted(function: Callable[[], Any]) -> int:
    """Instructions that Python interprets in the watched folders during a call of `function`."""
    count = 0

    def trace(frame: Any, event: str, _argument: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(WATCHED):
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    # Python 3.12 looks for frames that want instructions when tracing starts; without one it counts none.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def work_of_a_step(llm: LLM, num_rows: int, params: SamplingParams) -> int:
    """The same for a decode step with `num_rows` rows, none of which enters, leaves or gets a block."""
    core = llm.engine.core
    for number in range(num_rows):
        core.add(
            EngineRequest(
                request_id=f"{num_rows}/{number}",
                prompt_token_ids=[number % 60, 3, 5],
                sampling_params=params,
                max_tokens=12,
                stop_token_ids=frozenset({63}) if params.min_tokens else frozenset(),
            )
        )
    while len(core.step()) < num_rows:
        pass
    core.step()
    plan = core.scheduler.plan()
    assert plan is not None
    assert (plan.num_rows, plan.added, plan.block_updates, plan.removed_slots) == (num_rows, [], [], [])
    results: list[Any] = []
    work = interpreted(lambda: results.append(core.executor.submit(plan).result()))
    core.scheduler.update(plan, results[0])
    while core.has_work():
        core.step()
    return work


@pytest.fixture(scope="module")
def llm() -> Any:
    settings = {"load_format": "dummy", "dtype": "float32", "num_blocks": 600, "num_threads": 1, "max_num_seqs": 256}
    plugins = {"attention.backend": "torch", "execution.kernels": "torch"}
    with LLM(overrides=SHAPE, max_num_batched_tokens=1024, **settings, **plugins) as shared:
        yield shared


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"temperature": 0}, id="greedy"),
        pytest.param({"temperature": 1}, id="random"),
        pytest.param({"temperature": 1, "top_p": 0.9, "top_k": 8, "min_p": 0.01}, id="truncated"),
        pytest.param({"temperature": 0, "frequency_penalty": 1, "repetition_penalty": 1.1}, id="penalties"),
        pytest.param({"temperature": 0, "logit_bias": {7: 2.0}, "min_tokens": 9}, id="bias and min_tokens"),
        pytest.param({"temperature": 0, "allowed_token_ids": [3, 4, 5]}, id="allowed tokens"),
    ],
)
def test_the_number_of_rows_does_not_matter(llm: LLM, params: dict[str, Any]) -> None:
    sampling = SamplingParams(seed=1, max_tokens=12, **params)
    few, many = (work_of_a_step(llm, rows, sampling) for rows in (8, 256))
    assert few == many > 0
