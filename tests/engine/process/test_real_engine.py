"""A real engine with a tiny model in its process: what it says, refuses and resumes is what the inline engine does."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import msgspec
import pytest

from llmkit import LLM, AsyncLLM, PluginInfo, Registry, SamplingParams, hookimpl
from llmkit.engine.process.probe import Probe
from llmkit.errors import ConfigError, EngineError, InvalidRequestError, PluginError
from llmkit.requests.sampling_params import OutputKind

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 5,
}
SETTINGS = {
    "load_format": "dummy",
    "dtype": "float32",
    "num_blocks": 64,
    "max_num_seqs": 8,
    "num_threads": 1,
    "attention.backend": "torch",
    "execution.kernels": "torch",
    "overrides": SHAPE,
}
PROMPTS = [[1, 2, 3], [7] * 20, [9, 8]]
PARAMS = [
    SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, logprobs=1),
    SamplingParams(max_tokens=50, seed=3, n=3, ignore_eos=True, frequency_penalty=0.5, prompt_logprobs=1),
    SamplingParams(max_tokens=40, seed=4, min_tokens=20, repetition_penalty=1.2),
]


class Tally:
    """Writes the process that it is in to the file that LLMKIT_TEST_TALLY names."""

    info = PluginInfo(summary="tells where it is")

    @hookimpl
    def llmkit_engine_started(self):
        with open(os.environ["LLMKIT_TEST_TALLY"], "a", encoding="ascii") as file:
            file.write(f"{os.getpid()}\n")


@pytest.fixture(scope="module")
def inline():
    with LLM(**SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def llm():
    with LLM(process=True, **SETTINGS, **{"process.max_restarts": 50}) as llm:
        yield llm


def same_entries(some, others):
    assert (some is None) == (others is None)
    for one, other in zip(some or (), others or (), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.token_ids[0] == other.token_ids[0]
            assert one.logprobs == pytest.approx(other.logprobs, rel=1e-4)


def check_same(outputs, expected):
    """Tokens and ends are equal; log-probabilities to the last bits, which depend on what a step computes at once."""
    for one, other in zip(outputs, expected, strict=True):
        same_entries(one.prompt_logprobs, other.prompt_logprobs)
        for got, wanted in zip(one.outputs, other.outputs, strict=True):
            assert (got.token_ids, got.finish_reason) == (wanted.token_ids, wanted.finish_reason)
            same_entries(got.logprobs, wanted.logprobs)


def test_it_answers_as_inline(inline, llm):
    check_same(llm.generate(PROMPTS, PARAMS), inline.generate(PROMPTS, PARAMS))
    assert llm.stats().num_unfinished == 0
    assert {timing.kind for timing in llm.plugin_timings()} >= {"model", "scheduler"}
    assert llm.reset_prefix_cache()
    with pytest.raises(EngineError, match="another process"):
        llm.engine  # noqa: B018


def test_a_probe_is_an_ordinary_request(inline):
    probe, core = Probe(), inline.engine.core
    core.add(probe.sent())
    outputs = []
    while not probe.answered(outputs):
        outputs = core.step()
    assert [output.finish_reason for output in outputs] == ["length"]
    assert not core.has_work()


def test_it_goes_on_after_its_death(inline, llm):
    client = llm._loop.client
    params = msgspec.structs.replace(PARAMS[0], max_tokens=200)
    stream = llm.stream(PROMPTS[0], params)
    tokens, killed = [], 0
    for output in stream:
        tokens += output.outputs[0].token_ids
        if killed < 2 and len(tokens) > 50 * (killed + 1):
            killed += 1
            os.kill(client.pid, signal.SIGKILL)
    assert tokens == inline.generate(PROMPTS[0], params)[0].outputs[0].token_ids
    assert client.num_restarts == 2


def test_what_can_never_be_served_is_refused_as_inline(inline, llm):
    messages = []
    for one in (inline, llm):
        with pytest.raises(InvalidRequestError) as caught:
            one.generate([1] * 300, SamplingParams())
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_async_llm_and_plugins_registered_from_python(inline, tmp_path, monkeypatch):
    """The plugin is in the engine's process, once for each of its lives; streams do not notice that there were two."""
    monkeypatch.setenv("LLMKIT_TEST_TALLY", str(tmp_path / "tally"))
    registry = Registry.discover()
    registry.register("extension", "tally", Tally)
    settings = SETTINGS | {"extensions": ["tally"]}
    kinds = [msgspec.structs.replace(params, output_kind=OutputKind.FINAL_ONLY) for params in PARAMS]

    async def one(llm, prompt, params):
        async for output in llm.generate(prompt, params):
            last = output
        return last

    async def main(llm):
        async with llm:
            tasks = [asyncio.create_task(one(llm, *pair)) for pair in zip(PROMPTS, kinds, strict=True)]
            while (await llm.stats()).num_steps < 12:
                pass
            os.kill(llm._loop.client.pid, signal.SIGKILL)
            outputs = [await task for task in tasks]
            assert llm.health.num_restarts == 1
            return outputs

    outputs = asyncio.run(main(AsyncLLM(registry=registry, **settings)))
    check_same(outputs, inline.generate(PROMPTS, PARAMS))
    pids = (tmp_path / "tally").read_text().split()
    assert len(pids) == len(set(pids)) == 2
    assert str(os.getpid()) not in pids


def test_a_plugin_that_no_import_finds_is_refused():
    registry = Registry.discover()
    front_door = SimpleNamespace(info=Tally.info, llmkit_engine_started=Tally().llmkit_engine_started)
    registry.register("extension", "nameless", front_door)
    with pytest.raises(PluginError, match="registered as an object that no import can find"):
        LLM(process=True, registry=registry, **SETTINGS)


def test_a_start_that_fails_raises_the_engines_own_error():
    with pytest.raises(ConfigError, match="async_scheduling is true"):
        LLM(process=True, **SETTINGS, async_scheduling=True)


PROGRAM = """
    import os
    from llmkit import LLM, PluginInfo, Registry, SamplingParams, hookimpl
    print("imported", __name__, flush=True)

    class Tally:
        info = PluginInfo(summary="of the program itself")
        @hookimpl
        def llmkit_engine_started(self):
            print("started", flush=True)

    {guard}
        registry = Registry.discover()
        registry.register("extension", "tally", Tally)
        with LLM(process=True, registry=registry, extensions=["tally"], **{settings}) as llm:
            print(len(llm.generate([1, 2], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids))
"""


@pytest.mark.parametrize("guarded", [True, False])
def test_a_plugin_of_the_program_itself(tmp_path, guarded):
    guard = 'if __name__ == "__main__":' if guarded else "if True:"
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM).format(guard=guard, settings=SETTINGS))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=100, check=False)
    if guarded:
        assert done.stdout.split() == ["imported", "__main__", "3"], done.stderr
        assert "] started" in done.stderr
    else:
        assert done.returncode != 0
        assert 'Put what it does below `if __name__ == "__main__":`' in done.stderr
