"""The connector under the real scheduler, with a fake model whose every token depends on all that the cache holds."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmkit.hookspecs.connector import TransferReport
from llmkit.testing.scheduling import SchedulingHarness
from llmkit_connectors.offload.connector import OffloadConnector
from llmkit_connectors.offload.options import OffloadOptions
from llmkit_schedulers.fcfs import FcfsPolicy

BLOCK_BYTES = 4 * 8  # the fake cache: block_size entries of 8 bytes
GIB = 1 << 30
PROMPT = list(range(1, 30))


@pytest.fixture
def make_engine() -> Iterator[Callable[..., SchedulingHarness]]:
    made: list[SchedulingHarness] = []

    def make(host_blocks: int = 64, file_blocks: int | None = None, url: Path | None = None, **settings: Any) -> Any:
        options = OffloadOptions(
            host_gib=host_blocks * BLOCK_BYTES / GIB,
            file_gib=None if file_blocks is None else file_blocks * (BLOCK_BYTES + 100) / GIB,
            url=None if url is None else str(url),
            eviction=settings.pop("eviction", "lru"),
            num_threads=2,
        )
        made.append(SchedulingHarness(FcfsPolicy(), connector=OffloadConnector(options), **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.core.close()


def answer(engine: SchedulingHarness, name: str, prompt: list[int] = PROMPT) -> int:
    """Run one request, whose tokens the harness checks; how many tokens were loaded."""
    before = engine.core.stats().external_hit_tokens
    engine.add(name, prompt, 4)
    engine.run()
    stats = engine.core.stats()
    assert not stats.plugin_faults
    return stats.external_hit_tokens - before


def test_from_memory_from_files_and_after_a_reset(make_engine: Callable[..., Any], tmp_path: Path):
    engine = make_engine(num_blocks=12, url=tmp_path)
    assert answer(engine, "cold") == 0
    assert answer(engine, "another", [99, *PROMPT]) == 0  # fills the cache
    assert answer(engine, "memory") >= 12
    stats = engine.core.stats().connector
    assert stats["loaded_from_memory"] >= 3
    assert stats["file_stored"] == stats["stored"] >= 14
    restarted = make_engine(num_blocks=12, url=tmp_path)
    assert answer(restarted, "files") == 28
    assert restarted.core.stats().connector["file_hits"] == 7
    assert restarted.core.reset_prefix_cache()
    assert answer(restarted, "forgotten") == 0


@pytest.mark.parametrize("host_blocks", [3, 64])
def test_what_comes_from_files_is_not_stored_again(make_engine: Callable[..., Any], tmp_path: Path, host_blocks: int):
    """Also where host memory has no room for all of it."""
    answer(make_engine(url=tmp_path), "cold")
    engine = make_engine(url=tmp_path, host_blocks=host_blocks)
    assert answer(engine, "files") == 28
    engine.core.settle_transfers(10.0)
    stats = engine.core.stats().connector
    assert stats["loaded_from_files"] == 7
    assert stats["stored"] == stats["file_already_there"] == 1  # which was computed: the end of prompt and answer
    answer(engine, "another", [99, *PROMPT])
    engine.core.settle_transfers(10.0)
    assert engine.core.stats().connector["file_stored"] == 8


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_file_that_vanishes(make_engine: Callable[..., Any], tmp_path: Path, policy: str):
    answer(make_engine(url=tmp_path), "cold")
    engine = make_engine(url=tmp_path, connector_settings={"load_failure_policy": policy})
    half = engine.connector._half
    plan_transfers = half.plan_transfers

    def vanish(step: Any) -> Any:
        for load in step.loads:
            gone = load.request.block_hashes(4)[3].hex()
            [path] = [path for path in tmp_path.rglob("*.kv") if gone in path.name]
            path.unlink()
        return plan_transfers(step)

    half.plan_transfers = vanish
    engine.add("warm", PROMPT, 4)
    if policy == "recompute":
        engine.run()
        assert engine.answers["warm", 0].finish_reason == "length"
        assert engine.core.stats().external_hit_tokens == 12
    else:
        while engine.core.has_work():
            engine.step()
        assert engine.answers["warm", 0].finish_reason == "error"
        engine.core.settle_transfers(5.0)
    assert engine.core.stats().num_failed_loads == 1
    assert not engine.core.stats().plugin_faults


def test_storing_that_is_impossible_leaves_requests_alone(
    make_engine: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").write_bytes(b"")
    engine = make_engine(num_blocks=12, url=tmp_path / "file" / "cache", host_blocks=2)
    for number in range(20):
        answer(engine, f"{number}", [number, *PROMPT])
    stats = engine.core.stats().connector
    assert stats["file_failed"] > 0
    assert stats["file_failed"] + stats["file_skipped"] == stats["stored"] > 20
    assert stats["host_blocks_used"] <= 2
    assert len([record for record in caplog.records if "cannot be stored" in record.message]) == 1


@pytest.mark.parametrize("seed", range(40 if os.environ.get("LLMKIT_DEEP_TESTS") else 4))
def test_random_load_in_a_tiny_cache(make_engine: Callable[..., Any], tmp_path: Path, seed: int):
    """Requests that share prefixes come, are preempted and aborted, files are damaged and vanish, engines restart."""
    choose = random.Random(seed)
    settings: dict[str, Any] = {
        "num_blocks": choose.randint(14, 30),
        "max_num_batched_tokens": choose.choice([7, 16, 64]),
        "max_num_seqs": choose.randint(1, 5),
        "max_model_len": 48,
        "max_concurrent_steps": choose.choice([1, 2]),
        "windows": choose.choice([(None,), (None, 9), (5, None)]),
        "host_blocks": choose.choice([2, 10, 100]),
        "file_blocks": choose.choice([None, 3, 60]),
        "eviction": choose.choice(["lru", "arc"]),
        "url": choose.choice([tmp_path, tmp_path, None]),
    }
    loaded = 0
    for _ in range(3):
        engine = make_engine(**settings)
        for number in range(60):
            stem = [choose.randrange(3) + 1] * choose.randrange(1, 30)
            engine.add(f"{number}", [*stem, *range(5, 5 + choose.randrange(1, 8))], choose.randint(1, 8))
            for _ in range(choose.randrange(4)):
                engine.step()
            if choose.random() < 0.2:
                engine.core.abort([f"{choose.randrange(number + 1)}"])
            files = list(tmp_path.rglob("*.kv"))
            if files and choose.random() < 0.2:
                path = choose.choice(files)
                if choose.random() < 0.5:
                    path.unlink(missing_ok=True)
                else:
                    path.write_bytes(b"damaged")
        engine.run()
        stats = engine.core.stats()
        assert not stats.plugin_faults, stats.plugin_faults
        loaded += stats.external_hit_tokens
        engine.connector._half._index.check_integrity()
        assert stats.connector["host_blocks_used"] <= settings["host_blocks"]
    assert loaded > 0 or settings["url"] is None or settings["file_blocks"] is not None


@pytest.mark.parametrize("closes", [False, True])
def test_what_one_step_fills_beyond_half_of_the_cache_is_stored_behind_it(
    make_engine: Callable[..., Any], tmp_path: Path, closes: bool
):
    """Seven blocks of a cache of eight, of which four may be held at a time."""
    engine = make_engine(num_blocks=8, url=tmp_path)
    engine.add("one", PROMPT, 1)
    while engine.core.has_work():
        engine.step()
    assert engine.core.stats().connector["waiting_stores"] == 3
    if closes:
        engine.core.close()
    else:
        assert engine.core.settle_transfers(10.0)
    stats = engine.core.stats().connector
    assert (stats["stored"], stats["dropped"], stats["waiting_stores"]) == (7, 0, 0)
    if closes:
        assert len(list(tmp_path.rglob("*.kv"))) == 7
    engine.scheduler.check_integrity()


def test_what_waits_and_is_reused_meanwhile_is_not_stored(make_engine: Callable[..., Any]):
    engine = make_engine(num_blocks=8)
    for number in range(5):
        engine.add(f"{number}", [number, *PROMPT[1:]], 1)
        while engine.core.has_work():
            engine.step()
    engine.core.settle_transfers(10.0)
    stats = engine.core.stats().connector
    assert stats["stored"] + stats["dropped"] == 5 * 7
    assert stats["waiting_stores"] == 0
    assert not engine.core.stats().plugin_faults


def test_a_report_without_news_is_empty(make_engine: Callable[..., Any]):
    engine = make_engine()
    answer(engine, "one")
    assert engine.executor._connector.report() == TransferReport()
