"""Connectors in a whole engine: random weights, a real cache, real attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from llmkit import LLM, SamplingParams
from llmkit.errors import InvalidRequestError, PluginError
from llmkit.frontend.prompts import RequestOptions
from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.hookspecs.connector import Retention
from llmkit.registry import Registry
from llmkit.testing.memory_connector import MemoryConnector, MemoryScheduler, MemoryStore, memory_front_door

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
PROMPTS = [list(range(100)), list(range(50))]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0, logprobs=0)


def front_door(build):
    @hookimpl
    def llmkit_connector():
        return build()

    return SimpleNamespace(info=PluginInfo("for a test"), llmkit_connector=llmkit_connector)


def engine(door=None, **settings):
    registry = Registry.discover()
    if door is not None:
        registry.register("connector", "memory", door)
        settings["connector"] = "memory"
    return LLM(load_format="dummy", overrides=TINY, num_blocks=64, num_threads=1, registry=registry, **settings)


def tokens(llm, params=GREEDY):
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert not any(output.error for output in outputs)
    return [answer.token_ids for output in outputs for answer in output.outputs]


@pytest.fixture(scope="module")
def plain():
    """An engine without a connector."""
    with engine() as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(plain):
    return tokens(plain)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_answers_are_the_same_stored_by_one_engine_and_loaded_by_others(alone, asynchronous):
    """Also by one with another attention backend, whose cache has the same order of bytes."""
    store = MemoryStore()
    door = memory_front_door(store, asynchronous=asynchronous, delay=2)
    for number, attention in enumerate(("torch", "cpu", "torch")):
        with engine(door, attention=attention) as llm:
            assert tokens(llm) == alone
            assert llm.stats().external_hit_tokens == (96 if number else 0)
    assert len({key[0] for key in store.blocks}) == 1


def test_other_weights_find_nothing(alone):
    store = MemoryStore()
    for seed in (0, 1):
        with engine(memory_front_door(store), seed=seed) as llm:
            assert (tokens(llm) == alone) == (seed == 0)
            assert llm.stats().external_hit_tokens == 0
    assert len({key[0] for key in store.blocks}) == 2


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_load_that_fails(alone, policy):
    store = MemoryStore()
    with engine(memory_front_door(store)) as llm:
        tokens(llm)
    store.fails = lambda _: True
    with engine(memory_front_door(store), load_failure_policy=policy) as llm:
        if policy == "recompute":
            assert tokens(llm) == alone
        else:
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert {output.outputs[0].finish_reason for output in outputs} == {"error"}
        assert llm.stats().num_failed_loads > 0


class Answering(MemoryScheduler):
    def problems(self, params):
        return [] if params.get("do_remote_decode") is True else ["do_remote_decode must be true."]

    def request_finished(self, request, block_ids):
        return Retention(params={"remote_request_id": request.request_id, "num_blocks": len(block_ids[0])})


class AnsweringConnector(MemoryConnector):
    def scheduler_half(self, context):
        return Answering(self._store, context, False)


def test_params_go_to_the_connector_and_come_back():
    with engine(front_door(lambda: AnsweringConnector(MemoryStore()))) as llm:
        asked = RequestOptions(kv_transfer_params={"do_remote_decode": True})
        (output,) = llm.generate(PROMPTS[1], GREEDY, options=asked, use_tqdm=False)
        assert output.kv_transfer_params["num_blocks"] == 4
        with pytest.raises(InvalidRequestError, match="do_remote_decode must be true"):
            llm.generate(PROMPTS[1], GREEDY, options=RequestOptions(kv_transfer_params={}), use_tqdm=False)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([1], "JSON object"),
        ({"a": float("nan")}, "JSON object"),
        ({"a": {1, 2}}, "JSON object"),
        ({"a": "x" * (1 << 20)}, "characters"),
        ({"a": 1}, "no connector"),
    ],
)
def test_params_that_make_no_sense_are_refused(plain, alone, params, words):
    with pytest.raises(InvalidRequestError, match=words) as raised:
        plain.generate(PROMPTS[1], GREEDY, options=RequestOptions(kv_transfer_params=params), use_tqdm=False)
    assert raised.value.param == "kv_transfer_params"
    assert tokens(plain) == alone


class Broken(MemoryConnector):
    def __init__(self, half):
        super().__init__(MemoryStore())
        self._half = half

    def scheduler_half(self, context):
        return 5 if self._half == "scheduler" else super().scheduler_half(context)

    def worker_half(self, context):
        if self._half == "worker":
            raise RuntimeError("no device")
        return super().worker_half(context)


@pytest.mark.parametrize(("half", "words"), [("scheduler", "made a int"), ("worker", "no device")])
def test_a_connector_that_does_not_start_stops_the_engine(half, words):
    with pytest.raises(PluginError, match=words):
        engine(front_door(lambda: Broken(half)))
