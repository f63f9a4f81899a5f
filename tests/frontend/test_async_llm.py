"""AsyncLLM with a tiny model of random weights, the engine in a thread."""

from __future__ import annotations

import asyncio
import gc
import gzip
import itertools
import json
import threading

import msgspec
import pytest
import tokenizers

from llmkit import (
    LLM,
    AsyncLLM,
    EngineClosedError,
    EngineDrainingError,
    EngineError,
    InvalidRequestError,
    OutputKind,
    RequestOptions,
    RequestTimeoutError,
    SamplingParams,
)
from llmkit.grammars.backends import GrammarBackends
from llmkit.grammars.service import GrammarService
from llmkit.hookspecs.structured import GrammarRequest
from llmkit.requests.grammar_task import GrammarTask

SETTINGS = {
    "load_format": "dummy",
    "dtype": "float32",
    "num_blocks": 64,
    "max_num_seqs": 8,
    "num_threads": 1,
    "attention.backend": "torch",
    "execution.kernels": "torch",
    "overrides": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": 5,
    },
}
FREE = SamplingParams(max_tokens=6, ignore_eos=True, seed=1, output_kind=OutputKind.DELTA)
LONG = msgspec.structs.replace(FREE, max_tokens=200)


def make():
    return AsyncLLM(process=False, **SETTINGS)


@pytest.fixture(scope="module")
def llm():
    shared = make()
    yield shared
    asyncio.run(shared.close())


@pytest.mark.parametrize(("made", "given", "preloads"), [(AsyncLLM, None, 1), (AsyncLLM, False, 0), (LLM, None, 0)])
def test_an_engine_that_serves_is_ready_for_its_first_grammar(tmp_path, monkeypatch, made, given, preloads):
    """Its library is imported before requests come, not while others wait for their tokens."""
    words = {f"w{number}": number for number in range(128)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0")).save(str(tmp_path / "tokenizer.json"))
    monkeypatch.delenv("LLMKIT_STRUCTURED__PRELOAD_GRAMMARS")
    calls = []
    monkeypatch.setattr(GrammarService, "preload", lambda _: calls.append("engine"))
    monkeypatch.setattr(GrammarBackends, "preload", lambda _: calls.append("frontend"))
    settings = SETTINGS | {"preload_grammars": given} if given is not None else SETTINGS
    where = {"process": False} if made is AsyncLLM else {}
    llm = made(tokenizer=str(tmp_path / "tokenizer.json"), **where, **settings)
    closed = llm.close()
    if made is AsyncLLM:
        asyncio.run(closed)
    assert calls == ["frontend", "frontend", "engine"] * preloads  # whoever builds the engine has it loaded, too


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def nothing_left(llm):
    """Wait until the engine has nothing to do, and check that it holds nothing."""
    while (stats := await llm.stats()).num_unfinished:
        await asyncio.sleep(0)
    assert stats.num_free_blocks == stats.num_blocks
    assert llm.num_unfinished == 0


async def tokens(outputs):
    return [token for output in [o async for o in outputs] for token in output.outputs[0].token_ids]


@pytest.mark.parametrize("kind", OutputKind)
def test_kinds_of_output(llm, kind):
    async def main():
        expected = await tokens(llm.generate([1, 2, 3], FREE))
        outputs = [o async for o in llm.generate([1, 2, 3], msgspec.structs.replace(FREE, output_kind=kind))]
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        ids = [o.outputs[0].token_ids for o in outputs]
        if kind is OutputKind.DELTA:
            assert list(itertools.chain(*ids)) == expected
        else:
            assert ids[-1] == expected
        assert kind is not OutputKind.FINAL_ONLY or len(ids) == 1
        await nothing_left(llm)

    run(main())


def test_many_at_a_time_give_what_each_gives_alone(llm):
    async def main():
        alone = [await tokens(llm.generate([i], FREE)) for i in range(20)]
        together = await asyncio.gather(*(tokens(llm.generate([i], FREE)) for i in range(20)))
        assert together == alone
        await nothing_left(llm)

    run(main())


def test_a_bad_request_is_refused_before_anything_runs(llm):
    async def main():
        with pytest.raises(InvalidRequestError, match="empty"):
            llm.submit([], FREE)
        with pytest.raises(InvalidRequestError, match="SamplingParams"):
            llm.submit([1], {"temperature": 0})
        for timeout in (-1, float("nan"), "soon", True):
            with pytest.raises(InvalidRequestError, match="timeout must be a number"):
                llm.submit([1], FREE, timeout=timeout)
        with pytest.raises(InvalidRequestError, match="empty"):
            await anext(llm.generate([], FREE))
        assert llm.num_unfinished == 0

    run(main())


def test_first_tells_a_refusal_of_the_core(llm):
    """That no connector takes kv_transfer_params is known to the engine only."""

    async def main():
        refused = llm.submit([1], FREE, options=RequestOptions(kv_transfer_params={"a": 1}))
        with pytest.raises(InvalidRequestError) as raised:
            await refused.first()
        assert raised.value.param == "kv_transfer_params"
        (output,) = [o async for o in refused]
        assert (output.finished, output.outputs[0].finish_reason) == (True, "error")
        accepted = llm.submit([1], msgspec.structs.replace(LONG, output_kind=OutputKind.FINAL_ONLY))
        await accepted.first()
        assert not accepted.finished
        accepted.abort()
        await nothing_left(llm)

    run(main())


def test_a_slow_reader_gets_longer_outputs_and_loses_nothing(llm):
    async def main():
        expected = await tokens(llm.generate([7], LONG))
        slow = llm.submit([7], LONG)
        await slow.first()
        while not slow.finished:
            await asyncio.sleep(0)
        outputs = [o async for o in slow]
        assert len(outputs) == 1
        assert outputs[0].outputs[0].token_ids == expected

    run(main())


def test_abort_by_name_ends_the_stream_with_what_there_is(llm):
    async def main():
        named = RequestOptions(request_id="mine")
        streams = [llm.submit([i], LONG, options=named) for i in (1, 2)]
        for stream in streams:
            await stream.first()
        llm.abort(["mine", "unknown"])
        for stream in streams:
            outputs = [o async for o in stream]
            assert outputs[-1].finished
            assert outputs[-1].outputs[0].finish_reason == "abort"
            assert 0 < sum(len(o.outputs[0].token_ids) for o in outputs) < 200
        await nothing_left(llm)

    run(main())


class TestWhoStopsReadingAborts:
    def check(self, llm, stop):
        async def main():
            await stop()
            gc.collect()
            await nothing_left(llm)
            assert await tokens(llm.generate([1], FREE))

        run(main())

    def test_a_cancelled_task(self, llm):
        async def stop():
            task = asyncio.create_task(tokens(llm.generate([1], LONG)))
            while not llm.num_unfinished:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        self.check(llm, stop)

    def test_a_closed_generator(self, llm):
        async def stop():
            stream = llm.generate([1], LONG)
            await anext(stream)
            await stream.aclose()
            assert llm.num_unfinished == 0

        self.check(llm, stop)

    def test_a_forgotten_generator(self, llm):
        async def stop():
            await anext(llm.generate([1], LONG))

        self.check(llm, stop)

    def test_a_forgotten_submission(self, llm):
        async def stop():
            await llm.submit([1], LONG).first()

        self.check(llm, stop)

    def test_an_event_loop_that_ends(self, llm):
        async def leave():
            stream = llm.submit([1], LONG)
            await stream.first()
            return stream

        run(leave())
        self.check(llm, lambda: asyncio.sleep(0))


def test_a_timeout_ends_its_request_only(llm):
    async def main():
        other = asyncio.create_task(tokens(llm.generate([1], FREE)))
        late = llm.submit([1], LONG, timeout=0)
        with pytest.raises(RequestTimeoutError, match="not done within its 0 s"):
            async for _ in late:
                pass
        with pytest.raises(StopAsyncIteration):
            await anext(late)
        assert len(await other) == 6
        assert len(await tokens(llm.generate([1], FREE, timeout=50))) == 6
        await nothing_left(llm)

    run(main())


def test_cached_prefixes_can_be_forgotten(llm):
    async def main():
        prompt = list(range(40))
        await tokens(llm.generate(prompt, FREE))
        again = [o async for o in llm.generate(prompt, FREE)]
        assert again[-1].num_cached_tokens == 32
        assert await llm.reset_prefix_cache()
        anew = [o async for o in llm.generate(prompt, FREE)]
        assert anew[-1].num_cached_tokens == 0
        assert any(timing.kind == "model" for timing in await llm.plugin_timings())

    run(main())


def test_drain_and_close():
    async def main():
        async with make() as llm:
            running = llm.submit([1], LONG)
            assert not await llm.drain(timeout=0)
            with pytest.raises(EngineDrainingError):
                llm.submit([1], FREE)
            drained = asyncio.create_task(llm.drain())
            assert len(await tokens(running)) == 200
            assert await drained
            assert llm.health.ready
        assert not llm.health.alive
        with pytest.raises(EngineClosedError):
            llm.submit([1], FREE)
        with pytest.raises(EngineClosedError):
            await llm.stats()

    run(main())


def test_close_in_the_middle():
    async def main():
        llm = make()
        stream = llm.submit([1], LONG)
        await stream.first()
        await llm.close()
        with pytest.raises(EngineClosedError):
            [o async for o in stream]
        await llm.close()

    run(main())


@pytest.mark.parametrize("level", [0, 1, 2])
def test_sleep_in_the_middle_of_a_stream(llm, level):
    async def main():
        expected = await tokens(llm.generate([7, 8], LONG))
        stream = llm.submit([7, 8], LONG)
        await stream.first()
        await llm.sleep(level)
        assert await llm.is_sleeping()
        late = llm.submit([1], FREE)
        assert llm.health.ready
        assert (await llm.stats()).sleep_level == level
        await llm.wake_up()
        assert not await llm.is_sleeping()
        assert await tokens(stream) == expected
        assert len(await tokens(late)) == 6
        await nothing_left(llm)

    run(main())


def test_views_of_the_engine(llm):
    async def main():
        await tokens(llm.generate(list(range(40)), FREE))
        blocks = await llm.kv_map()
        assert sum(blocks.counts().values()) == (await llm.stats()).num_blocks
        steps = await llm.recent_steps()
        assert (await llm.recent_steps(after=steps[-2].step))[0] == steps[-1]

    run(main())


def test_a_profile_is_a_trace_in_a_file(llm, tmp_path):
    async def main():
        with pytest.raises(EngineError, match="no profile is being recorded"):
            await llm.stop_profile()
        await llm.start_profile(tmp_path / "new")
        with pytest.raises(EngineError, match="recorded already"):
            await llm.start_profile(tmp_path)
        await tokens(llm.generate([1, 2], FREE))
        path = await llm.stop_profile()
        assert path.parent == tmp_path / "new"
        names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
        assert "aten::mm" in names or "aten::linear" in names or "aten::addmm" in names
        (tmp_path / "file").write_text("")
        with pytest.raises(EngineError, match="folder for profiles cannot be made"):
            await llm.start_profile(tmp_path / "file")

    run(main())


def test_while_a_grammar_is_chosen_the_event_loop_goes_on(llm, monkeypatch):
    async def main():
        loop = asyncio.get_running_loop()
        may_end = threading.Event()

        def choose(_):
            assert may_end.wait(30)
            raise InvalidRequestError("no grammar", param="structured_outputs")

        monkeypatch.setattr(llm.input_processor, "grammar_task", choose)
        loop.call_later(0.01, may_end.set)  # happens only if the loop is not held
        with pytest.raises(InvalidRequestError, match="no grammar"):
            async for _ in llm.generate([1, 2, 3], SamplingParams(structured_outputs={"regex": "a"})):
                pass

    run(main())


def test_a_grammar_that_was_chosen_is_not_chosen_again(llm, monkeypatch):
    chosen = []
    task = GrammarTask(GrammarRequest("regex", "a"), ("none",))
    monkeypatch.setattr(llm.input_processor, "grammar_task", lambda params: chosen.append(params) or task)

    async def main():
        params = SamplingParams(structured_outputs={"regex": "a"})
        assert await llm.choose_grammar(SamplingParams()) is None
        grammar = await llm.choose_grammar(params)
        prepared = [llm.input_processor.prepare(prompt, params, grammar=grammar) for prompt in ([1, 2], [3, 4])]
        assert all(one.engine_request.grammar is task for one in prepared)
        assert chosen == [params]

    run(main())
