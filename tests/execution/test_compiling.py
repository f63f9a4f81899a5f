"""Kernels are compiled before the first request, once."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

from llmkit.execution.compiling import PROMPT_TOKENS, compile_ahead, first_steps
from llmkit.jit import known, runtime
from llmkit.kv_cache.layout import KVCacheLayout, KVGroup
from llmkit.logs import START_LOGGER

TINY = """
import sys
from llmkit import LLM, SamplingParams
from llmkit.jit import known, runtime

known.is_known = lambda users: False
remembered = []
known.remember = remembered.append
shape = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
with LLM(load_format="dummy", dtype="float32", num_blocks=64, kernels="cpu", attention="cpu", quantization=sys.argv[1],
         overrides=shape) as llm:
    assert len(remembered) == 1, remembered
    llm_stats = llm.stats()
    assert llm_stats.num_free_blocks == llm_stats.num_blocks
    asked = []
    runtime.compile_kernel = lambda *arguments: asked.append(arguments)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)
    first = llm.generate([{"prompt_token_ids": [7] * 40}, {"prompt_token_ids": [9]}], params)
    assert not asked, asked
    assert all(len(answer.outputs[0].token_ids) == 4 for answer in first)
"""


@pytest.fixture
def setup_of():
    chosen = SimpleNamespace(kind="k", distribution="d", name="n", version="1")
    config = SimpleNamespace(model=SimpleNamespace(dtype="float32", max_model_len=100))
    return SimpleNamespace(registry=SimpleNamespace(chosen=lambda _: chosen), config=config)


class Runner:
    def __init__(self, problem=None):
        self.plans = []
        self.problem = problem

    def execute(self, plan):
        self.plans.append(plan)
        if self.problem is not None and plan.num_rows:
            raise self.problem


@pytest.fixture
def notes(monkeypatch):
    """What is known, by users; kernels count as used."""
    found = set()
    monkeypatch.setattr(runtime, "loaded", lambda: True)
    monkeypatch.setattr(known, "is_known", found.__contains__)
    monkeypatch.setattr(known, "remember", found.add)
    return found


def layout(num_blocks=64, num_groups=1, block_size=4):
    groups = tuple(KVGroup(None, (g,)) for g in range(num_groups))
    return KVCacheLayout(groups, num_blocks, block_size, block_size)


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_the_first_request_asks_for_no_kernel(quantization):
    subprocess.run([sys.executable, "-c", TINY, quantization], check=True, timeout=120)


def test_a_prompt_and_a_token_once(notes, setup_of, caplog):
    runner = Runner()
    with caplog.at_level(logging.INFO, START_LOGGER):
        compile_ahead(runner, setup_of, layout())
    assert [plan.num_tokens for plan in runner.plans] == [PROMPT_TOKENS, 1, 0]
    assert runner.plans[-1].removed_slots == [0]
    assert len(notes) == 1
    (line,) = [record.message for record in caplog.records if record.name == START_LOGGER]
    assert "once on this machine" in line
    caplog.clear()
    with caplog.at_level(logging.INFO, START_LOGGER):
        compile_ahead(runner, setup_of, layout())
    assert len(runner.plans) == 3
    assert not caplog.records


def test_a_step_that_fails_stops_no_start(notes, setup_of, caplog):
    runner = Runner(OSError("no compiler"))
    with caplog.at_level(logging.WARNING, "llmkit.execution"):
        compile_ahead(runner, setup_of, layout())
    assert "OSError: no compiler" in caplog.text
    assert runner.plans[-1].removed_slots == [0]
    assert not notes


def test_nothing_is_done_where_no_kernels_are_compiled(monkeypatch, setup_of):
    monkeypatch.setattr(runtime, "loaded", lambda: False)
    runner = Runner()
    compile_ahead(runner, setup_of, layout())
    assert runner.plans == []


@pytest.mark.parametrize(
    ("num_blocks", "max_len", "tokens"), [(64, 100, 16), (3, 100, 7), (64, 5, 3), (64, 2, 0), (1, 9, 0)]
)
def test_the_prompt_fits_model_and_cache(num_blocks, max_len, tokens):
    plans = list(first_steps(layout(num_blocks), max_len))
    assert [plan.num_tokens for plan in plans] == ([tokens, 1] if tokens else [])


def test_groups_have_blocks_of_their_own():
    (added,) = next(first_steps(layout(num_groups=3), 100)).added
    blocks = [block for table in added.block_ids for block in table]
    assert len(added.block_ids) == 3
    assert len(set(blocks)) == len(blocks)
    assert 0 not in blocks
    assert max(blocks) < 64
    assert all(len(table) * 4 > PROMPT_TOKENS for table in added.block_ids)
