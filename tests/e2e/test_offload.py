"""The reference tokens with the offload connector: cold, warm in host memory, and after a restart on warm files.

Six prompts of several blocks and the beginnings of their answers by default; all 20 with whole answers with
LLMKIT_DEEP_TESTS=1.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmkit import LLM, RequestOutput, SamplingParams

DEEP = os.environ.get("LLMKIT_DEEP_TESTS") == "1"
BLOCK = 8


def loads(llm: LLM, answer: Callable[[], None]) -> tuple[int, int]:
    """Tokens that were loaded, and tokens that the cache had, while `answer` ran."""
    before = llm.stats()
    answer()
    stats = llm.stats()
    assert stats.num_failed_loads == 0
    assert not stats.plugin_faults
    return (
        stats.external_hit_tokens - before.external_hit_tokens,
        stats.prefix_hit_tokens - before.prefix_hit_tokens,
    )


def one_by_one(llm: LLM, chats: list[dict[str, Any]], num_tokens: int) -> None:
    """Compare the beginnings of the answers with the reference. What was computed is stored before the next one."""
    for chat in chats:
        [output] = llm.generate(chat["prompt_token_ids"], SamplingParams(temperature=0, max_tokens=num_tokens))
        assert output.error is None
        assert list(output.outputs[0].token_ids) == chat["output_token_ids"][:num_tokens]
        llm.engine.core.settle_transfers(10.0)


def test_golden_tokens_cold_warm_and_after_a_restart(
    make_llm: Callable[..., LLM], golden: list[dict[str, Any]], tmp_path: Path
):
    """The cache has room for one request at a time, so most of what was computed before has to be loaded."""
    chats = [item for item in golden if len(item["prompt_token_ids"]) > 24][: None if DEEP else 6]
    settings = {"connector": "offload", "num_blocks": 10, "block_size": BLOCK, "max_model_len": 72}
    settings["plugins.connector.offload.url"] = str(tmp_path)
    loadable = sum((len(chat["prompt_token_ids"]) - 1) // BLOCK * BLOCK for chat in chats)
    with make_llm(**settings) as first:
        loaded, cached = loads(first, lambda: one_by_one(first, chats, 6))
        assert loaded + cached < loadable  # the beginnings that the prompts have in common
        loaded, cached = loads(first, lambda: one_by_one(first, chats, 6))
        assert loaded + cached == loadable
        assert loaded >= 3 * BLOCK
        assert first.stats().connector["dropped"] == 0
    with make_llm(**settings) as restarted:
        loaded, cached = loads(restarted, lambda: one_by_one(restarted, chats, 6))
        assert loaded + cached == loadable
        assert loaded >= 3 * BLOCK
    assert len(list(tmp_path.rglob("*.kv"))) >= 12
    assert not list(tmp_path.rglob(".tmp*"))


@pytest.mark.skipif(not DEEP, reason="takes a minute: LLMKIT_DEEP_TESTS=1")
@pytest.mark.parametrize("scheduler", ["fcfs", "priority", "fair", "classic", "srtf"])
def test_all_golden_tokens_in_a_batch(
    make_llm: Callable[..., LLM],
    golden_prompts: list[list[int]],
    golden_params: SamplingParams,
    check_golden: Callable[[list[RequestOutput]], None],
    tmp_path: Path,
    scheduler: str,
):
    """Whole answers to all prompts together, two each, in so small a cache that some are preempted: on a cold disk,
    from host memory, and after a restart from files."""
    settings: dict[str, Any] = {"connector": "offload", "scheduler": scheduler, "max_model_len": 256}
    settings |= {"num_blocks": 40, "block_size": BLOCK}
    settings["plugins.connector.offload.url"] = str(tmp_path)
    params = msgspec.structs.replace(golden_params, n=2)

    def answer_all(llm: LLM) -> int:
        loaded, _ = loads(llm, lambda: check_golden(llm.generate(golden_prompts, params)))
        llm.engine.core.settle_transfers(10.0)
        return loaded

    with make_llm(**settings) as first:
        answer_all(first)
        assert answer_all(first) >= 3 * BLOCK
        assert first.stats().num_preemptions > 0
    with make_llm(**settings) as restarted:
        assert answer_all(restarted) >= 3 * BLOCK
        assert restarted.stats().connector["loaded_from_files"] >= 3
