"""The engine process is killed under a real model in the middle of many streams: nobody notices.

LLMKIT_DEEP_TESTS=1: 64 streams at a time, a kill every 20 seconds for five minutes.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from llmkit import AsyncLLM, SamplingParams
from llmkit.requests.sampling_params import OutputKind

DEEP = os.environ.get("LLMKIT_DEEP_TESTS") == "1"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "river": {"type": "string"}}}


def requests_of(golden: list[dict[str, Any]], count: int, max_tokens: int) -> list[tuple[str, SamplingParams]]:
    """Prompts and parameters of every kind that a restart might disturb, greedy and seeded by turns."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 0, "frequency_penalty": 0.6, "repetition_penalty": 1.1},
        {"temperature": 1.1, "n": 2, "min_tokens": 8},
        {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.8, "stop": [" the"], "min_tokens": 12},
        {"temperature": 0, "structured_outputs": {"json": SCHEMA}},
        {"temperature": 0.7, "top_k": 20, "bad_words": ["and"], "logit_bias": {30: -2.0}},
    ]
    common = {"max_tokens": max_tokens, "ignore_eos": True, "output_kind": OutputKind.DELTA}
    return [
        (golden[i % len(golden)]["prompt"], SamplingParams(**common, seed=i, **kinds[i % len(kinds)]))
        for i in range(count)
    ]


class Answer:
    """What a reader of a stream has got, by sequence."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.token_ids: dict[int, list[int]] = {}
        self.ends: dict[int, tuple[Any, Any]] = {}
        self.num_logprobs = 0
        self.num_prompt_logprobs = 0

    def take(self, output: Any) -> None:
        for news in output.outputs:
            self.texts[news.index] = self.texts.get(news.index, "") + news.text
            self.token_ids.setdefault(news.index, []).extend(news.token_ids)
            self.num_logprobs += len(news.logprobs or ())
            if news.finish_reason is not None:
                self.ends[news.index] = news.finish_reason, news.stop_reason
        self.num_prompt_logprobs = max(self.num_prompt_logprobs, len(output.prompt_logprobs or ()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return repr(vars(self))

    __hash__ = None  # type: ignore[assignment]


async def answer(llm: AsyncLLM, prompt: str, params: SamplingParams, answers: list[Answer]) -> Answer:
    taken = Answer()
    answers.append(taken)
    async for output in llm.generate(prompt, params):
        taken.take(output)
    return taken


async def answer_all(
    llm: AsyncLLM, requests: Sequence[tuple[str, SamplingParams]], under_way: list[Answer]
) -> list[Answer]:
    return await asyncio.gather(*(answer(llm, *request, under_way) for request in requests))


def kill(llm: AsyncLLM) -> None:
    pid = llm._loop.client.pid  # type: ignore[attr-defined]
    with suppress(TypeError, ProcessLookupError):  # it is being started again
        os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def killing_at(llm: AsyncLLM, under_way: list[Answer], counts: Sequence[int]) -> AsyncIterator[None]:
    """Kill the engine process whenever so many tokens have come."""

    async def watch() -> None:
        for count in counts:
            while sum(len(ids) for taken in under_way for ids in taken.token_ids.values()) < count:
                await asyncio.sleep(0.005)
            kill(llm)

    task = asyncio.create_task(watch())
    yield
    await task


@pytest.mark.long
def test_no_stream_notices_that_the_engine_was_killed(
    smollm2_gguf: Path, settings: dict[str, Any], golden: list[dict[str, Any]]
) -> None:
    """Once by default; once more, in its second life, with LLMKIT_DEEP_TESTS=1."""
    requests, kills = requests_of(golden, 8, 32), (60, 180) if DEEP else (90,)

    async def main() -> None:
        # Other tests may keep the machine from compiling for a while.
        async with AsyncLLM(smollm2_gguf, compile_wait_s=60.0, compile_timeout_s=30.0, **settings) as llm:
            undisturbed = await answer_all(llm, requests, [])
            under_way: list[Answer] = []
            async with killing_at(llm, under_way, kills):
                disturbed = await answer_all(llm, requests, under_way)
            for number, (one, other) in enumerate(zip(disturbed, undisturbed, strict=True)):
                assert one == other, f"stream {number}"
            assert llm.health.num_restarts == len(kills)
            stats = await llm.stats()
            assert (stats.num_unfinished, stats.num_free_blocks) == (0, stats.num_blocks)

    asyncio.run(main())


def test_the_engine_process_decides_as_the_program_would(smollm2_gguf: Path, settings: dict[str, Any]) -> None:
    """It gets a configuration whose defaults are filled in, and must not take them for what was asked for."""

    async def main() -> list[str]:
        async with AsyncLLM(smollm2_gguf, **settings | {"dtype": "auto"}) as llm:
            return [selection.name for selection in await llm.selections() if selection.kind == "quantization"]

    assert asyncio.run(main()) == ["int4"]


@pytest.mark.skipif(not DEEP, reason="takes seven minutes; LLMKIT_DEEP_TESTS=1 runs it")
def test_three_kills_a_minute_for_five_minutes(smollm2_gguf: Path, golden: list[dict[str, Any]]) -> None:
    requests = requests_of(golden, 64, 96)

    async def main() -> None:
        async with AsyncLLM(smollm2_gguf, max_num_seqs=128, max_model_len=512, memory_gib=3) as llm:
            undisturbed = await answer_all(llm, requests, [])
            loop = asyncio.get_running_loop()
            end = loop.time() + 300

            async def reader(number: int) -> int:
                rounds = 0
                while loop.time() < end:
                    taken = await answer(llm, *requests[number], [])
                    assert taken == undisturbed[number], f"stream {number}, round {rounds}"
                    rounds += 1
                return rounds

            async def killer() -> int:
                for kills in itertools.count(1):
                    await asyncio.sleep(20)
                    if loop.time() >= end:
                        return kills - 1
                    kill(llm)
                raise AssertionError

            *rounds, kills = await asyncio.gather(*(reader(i) for i in range(len(requests))), killer())
            print(f"{sum(rounds)} streams over {kills} kills")
            assert kills == 14
            assert llm.health.num_restarts == kills
            stats = await llm.stats()
            assert (stats.num_unfinished, stats.num_free_blocks) == (0, stats.num_blocks)

    asyncio.run(main())
