"""The reference tokens with the offload connector: cold, warm in host memory, and after a restart on warm files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmkit import LLM, SamplingParams

NUM_TOKENS = 6


@pytest.fixture(scope="module")
def chats(golden: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prompts of several blocks."""
    return [item for item in golden if len(item["prompt_token_ids"]) > 24][:6]


def answer_all(llm: LLM, chats: list[dict[str, Any]]) -> tuple[int, int]:
    """Compare all answers with the reference; how many prompt tokens were loaded, and how many the cache had."""
    before = llm.stats()
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    for chat in chats:
        output = llm.generate(chat["prompt_token_ids"], params)[0]
        assert output.error is None
        assert list(output.outputs[0].token_ids) == chat["output_token_ids"][:NUM_TOKENS]
    stats = llm.stats()
    assert stats.num_failed_loads == 0
    assert not stats.plugin_faults
    return (
        stats.external_hit_tokens - before.external_hit_tokens,
        stats.prefix_hit_tokens - before.prefix_hit_tokens,
    )


def test_golden_tokens_cold_warm_and_after_a_restart(
    make_llm: Callable[..., LLM], chats: list[dict[str, Any]], tmp_path: Path
):
    # The cache has room for one request at a time, so most of what was computed before has to be loaded.
    settings = {"connector": "offload", "num_blocks": 10, "block_size": 8, "max_model_len": 48}
    settings["plugins.connector.offload.url"] = str(tmp_path)
    loadable = sum((len(chat["prompt_token_ids"]) - 1) // 8 * 8 for chat in chats)
    with make_llm(**settings) as first:
        loaded, cached = answer_all(first, chats)
        assert loaded + cached < loadable  # the beginnings that the prompts have in common
        loaded, cached = answer_all(first, chats)
        assert loaded + cached >= loadable * 3 // 4  # not all: no more than half of the cache is held for stores
        assert loaded >= 3 * 8
    with make_llm(**settings) as restarted:
        loaded, cached = answer_all(restarted, chats)
        assert loaded + cached >= loadable * 3 // 4  # not all: no more than half of the cache is held for stores
        assert loaded >= 3 * 8
    assert len(list(tmp_path.rglob("*.kv"))) >= 12
    assert not list(tmp_path.rglob(".tmp*"))
