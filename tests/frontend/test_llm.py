"""LLM with a tiny model of random weights: no files, no tokenizer."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np
import pytest

from llmkit import (
    LLM,
    ConfigError,
    EngineClosedError,
    InvalidRequestError,
    ModelError,
    PluginError,
    PluginInfo,
    Registry,
    RequestOptions,
    SamplingParams,
    hookimpl,
)
from llmkit.kv_cache.events import AllBlocksCleared, BlockStored

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
}
FREE = SamplingParams(max_tokens=6, ignore_eos=True, seed=1)


def tiny(**changes):
    shape = SHAPE | changes.pop("shape", {})
    return LLM(**(SETTINGS | {"overrides": shape} | changes))


@pytest.fixture(scope="module")
def llm():
    with tiny() as shared:
        yield shared


def test_forms_of_prompts(llm):
    import numpy as np

    one = llm.generate([1, 2, 3], FREE)
    assert len(one) == 1
    many = llm.generate([[1, 2, 3], {"prompt_token_ids": [1, 2, 3]}, np.array([1, 2, 3])], FREE)
    assert [output.outputs[0].token_ids for output in many] == [one[0].outputs[0].token_ids] * 3


def test_parameters_for_each_prompt(llm):
    params = [msgspec.structs.replace(FREE, max_tokens=n) for n in (1, 2)]
    assert [len(o.outputs[0].token_ids) for o in llm.generate([[1], [2]], params)] == [1, 2]
    options = [RequestOptions(request_id="a"), RequestOptions(request_id="b")]
    assert [o.request_id for o in llm.generate([[1], [2]], FREE, options=options)] == ["a", "b"]
    with pytest.raises(InvalidRequestError, match=r"as many as prompts \(2\)"):
        llm.generate([[1], [2]], params[:1])
    with pytest.raises(InvalidRequestError, match="SamplingParams"):
        llm.generate([1], {"temperature": 0})


class TestUserAndPriority:
    """They reach the scheduling policy, however they are given."""

    @pytest.fixture
    def seen(self, llm):
        """(user, priority) of every request that has ended, in the order of the prompts."""
        core = llm.engine.core
        finished, before = [], list(core._on_finished)
        core._on_finished[:] = [lambda request: finished.append((request.user, request.priority))]
        yield finished
        core._on_finished[:] = before

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ({}, [(None, 0), (None, 0)]),
            ({"user": "a"}, [("a", 0), ("a", 0)]),
            ({"user": ["a", None], "priority": [3, -1]}, [("a", 3), (None, -1)]),
            ({"user": "a", "options": RequestOptions(user="a", priority=2)}, [("a", 2), ("a", 2)]),
            ({"priority": 5, "options": [RequestOptions(user="a"), RequestOptions()]}, [("a", 5), (None, 5)]),
        ],
    )
    def test_generate(self, llm, seen, given, expected):
        llm.generate([[1], [2]], FREE, **given)
        assert sorted(seen, key=str) == sorted(expected, key=str)

    def test_stream(self, llm, seen):
        list(llm.stream([1], FREE, user="a", priority=-3))
        assert seen == [("a", -3)]

    @pytest.mark.parametrize(
        ("given", "match"),
        [
            ({"user": ["a"]}, r"user must be one, or as many as prompts \(2\)"),
            ({"user": "b", "options": RequestOptions(user="a")}, "user and options say different things"),
            ({"user": 5}, "user must be a text"),
            ({"user": ""}, "user must be a text"),
            ({"priority": "high"}, "priority must be a 32-bit integer"),
            ({"user": "a", "options": [5, 5]}, "options must be RequestOptions"),
        ],
    )
    def test_refused(self, llm, given, match):
        with pytest.raises(InvalidRequestError, match=match):
            llm.generate([[1], [2]], FREE, **given)


@pytest.mark.parametrize(
    "prompts", [[], None, 5, b"x", [None], [[None]], [object()], [[1], []], [[1], [128]], ["text"]]
)
def test_bad_prompts(llm, prompts):
    with pytest.raises(InvalidRequestError):
        llm.generate(prompts, FREE)
    assert llm.stats().num_unfinished == 0


def test_a_stream_equals_the_whole(llm):
    whole = llm.generate([1, 2, 3], FREE)[0].outputs[0].token_ids
    deltas = list(llm.stream([1, 2, 3], FREE))
    assert [token_id for delta in deltas for token_id in delta.outputs[0].token_ids] == whole
    assert deltas[-1].finished


def test_an_abandoned_stream_leaves_nothing(llm):
    stream = llm.stream([1, 2, 3], msgspec.structs.replace(FREE, max_tokens=100))
    next(stream)
    assert llm.stats().num_unfinished == 1
    stream.close()
    assert llm.stats().num_unfinished == 0
    llm.stream([1, 2, 3], FREE)
    assert llm.stats().num_unfinished == 0


def test_several_answers(llm):
    params = SamplingParams(n=3, temperature=1.5, seed=3, max_tokens=8, ignore_eos=True)
    outputs = llm.generate([1, 2, 3], params)[0].outputs
    assert [output.index for output in outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in outputs}) > 1


def test_a_failing_step_fails_its_requests_only(llm, monkeypatch):
    executor = llm.engine.core.executor
    with monkeypatch.context() as patch:
        patch.setattr(executor, "submit", lambda _: 1 / 0)
        failed = llm.generate([[1], [2]], FREE)
    assert [output.outputs[0].finish_reason for output in failed] == ["error", "error"]
    assert "ZeroDivisionError" in failed[0].error
    assert llm.generate([1], FREE)[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("cut", [lambda logits: logits[:1], lambda logits: logits[:, :5], lambda _: None])
def test_a_model_that_returns_logits_of_another_shape(llm, monkeypatch, cut):
    """One row would be taken for the row of every request."""
    runner = llm.engine.core.executor._worker._runner
    logits = runner._model.logits
    with monkeypatch.context() as patch:
        patch.setattr(runner._model, "logits", lambda hidden: cut(logits(hidden)))
        failed = llm.generate([[1], [2]], FREE)
    assert [output.outputs[0].finish_reason for output in failed] == ["error", "error"]


def test_progress_bar(llm, capsys):
    llm.generate([[1], [2]], FREE, use_tqdm=True)
    assert "Requests" in capsys.readouterr().err
    llm.generate([[1], [2]], FREE)
    assert capsys.readouterr().err == ""


def test_without_tokenizer_everything_but_text(llm):
    assert llm.tokenizer is None
    for use in (lambda: llm.encode("x"), lambda: llm.decode([1]), lambda: llm.chat([{"role": "user", "content": "x"}])):
        with pytest.raises(InvalidRequestError, match="no tokenizer"):
            use()


def test_prefix_cache_can_be_reset(llm):
    prompt = list(range(40))
    llm.generate(prompt, FREE)
    assert llm.generate(prompt, FREE)[0].num_cached_tokens == 32
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, FREE)[0].num_cached_tokens == 0


def test_closed():
    llm = tiny()
    stream = llm.stream([1], FREE)
    next(stream)
    llm.close()
    llm.close()
    for use in (llm.stats, llm.reset_prefix_cache, lambda: llm.engine, lambda: llm.generate([1]), lambda: next(stream)):
        with pytest.raises(EngineClosedError):
            use()


class Recorder:
    """An extension that notes what it is told."""

    from llmkit import PluginInfo, hookimpl

    info = PluginInfo(summary="records")

    def __init__(self):
        self.told = []

    @hookimpl
    def llmkit_engine_started(self, config):
        self.told.append(("started", config.model.dtype))

    @hookimpl
    def llmkit_request_finished(self, request):
        self.told.append(("finished", request.num_output_tokens))

    @hookimpl
    def llmkit_engine_stopped(self):
        self.told.append(("stopped",))


def test_extensions_are_told():
    from llmkit import Registry

    registry, recorder = Registry.discover(), Recorder()
    registry.register("extension", "recorder", recorder)
    with tiny(registry=registry, extensions=("recorder",)) as llm:
        llm.generate([1], FREE)
    assert recorder.told == [("started", "float32"), ("finished", 6), ("stopped",)]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"max_model_len": 257}, ConfigError, "1 to 256"),
        ({"max_modle_len": 5}, ConfigError, "max_model_len"),
        ({"shape": {"vocab_size": 0}}, ModelError, "vocab_size"),
        ({"shape": {"architectures": ["NoSuchModel"]}}, ModelError, "NoSuchModel"),
        ({"scheduler.policy": "none_such"}, PluginError, "none_such"),
        ({"extensions": ("none_such",)}, PluginError, "none_such"),
        ({"connector.name": "none_such"}, PluginError, "none_such"),
        ({"structured.backend": "x"}, ConfigError, "structured"),
        ({"scheduler.async_scheduling": True}, ConfigError, "async_scheduling"),
        ({"execution.device": "cuda:x"}, ConfigError, "cuda:x"),
    ],
)
def test_settings_that_cannot_work(changes, error, words):
    with pytest.raises(error, match=words):
        tiny(**changes)


def test_a_model_with_dynamic_rope_starts_with_default_settings():
    """Up to the length it was trained for, where it is the plain embedding."""
    rope = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    with tiny(shape=rope) as stretched, tiny() as plain:
        assert stretched.config.model.max_model_len == 256
        prompt = list(range(3, 90))
        both = [one.generate(prompt, FREE)[0].outputs[0].token_ids for one in (stretched, plain)]
        assert both[0] == both[1]
    with pytest.raises(ConfigError, match="1 to 256"):
        tiny(shape=rope, max_model_len=300)


def test_metrics_of_a_request(llm):
    metrics = llm.generate([1, 2, 3], FREE)[0].metrics
    times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time]
    times += [metrics.last_token_time, metrics.finished_time]
    assert times == sorted(times)
    assert metrics.num_preemptions == 0


def test_preemptions_are_counted_in_the_metrics():
    with tiny(num_blocks=5, max_model_len=64, enable_prefix_caching=False) as small:
        params = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)
        outputs = small.generate([[1] * 20, [2] * 20], params)
        counts = [output.metrics.num_preemptions for output in outputs]
        assert sum(counts) == small.stats().num_preemptions > 0


class KVWatcher:
    """An extension of a program that embeds llmkit: mirrors what the prefix cache holds."""

    info = PluginInfo("watches the prefix cache")
    events: ClassVar[list[object]] = []

    @staticmethod
    @hookimpl
    def llmkit_kv_event(event):
        KVWatcher.events.append(event)


def test_kv_events_reach_an_extension():
    registry = Registry.discover()
    registry.register("extension", "watcher", KVWatcher)
    KVWatcher.events.clear()
    with tiny(registry=registry, extensions=["watcher"], block_size=16) as watched:
        watched.generate(list(range(10, 50)), FREE)
        (stored,) = KVWatcher.events
        assert isinstance(stored, BlockStored)
        assert (stored.token_ids, stored.block_size, len(stored.block_hashes)) == (list(range(10, 42)), 16, 2)
        assert stored.parent_block_hash is None
        assert watched.reset_prefix_cache()
        assert isinstance(KVWatcher.events[-1], AllBlocksCleared)


def test_calls_of_plugins_are_counted():
    registry = Registry.discover()
    registry.register("extension", "watcher", KVWatcher)
    with tiny(registry=registry, extensions=["watcher"], **{"scheduler.policy": "priority"}) as watched:
        watched.generate([[1, 2, 3], [4, 5, 6]], FREE)
        timings = {(timing.kind, timing.name): timing for timing in watched.plugin_timings()}
    policy = timings["scheduler", "priority"]
    assert policy.import_seconds > 0
    assert policy.create_seconds > 0
    assert policy.calls["add"].calls == policy.calls["pop"].calls == 2
    assert policy.calls["peek"].seconds > 0
    assert ("scheduler", "fcfs") not in timings
    steps = timings["executor", "inline"].calls["submit"].calls
    assert steps >= 6
    assert timings["model", "LlamaForCausalLM"].calls["forward"].calls == steps
    assert timings["attention", "torch"].calls["plan"].calls == steps


@pytest.mark.parametrize("value", [7, "a", b"a", [1], {"a": 1}, np.array([1, 2]), object()])
@pytest.mark.parametrize(
    "name", ["tools", "chat_template_kwargs", "documents", "add_generation_prompt", "continue_final_message"]
)
def test_chat_arguments_of_another_type_are_refused_by_name(llm, name, value):
    if name == "chat_template_kwargs" and isinstance(value, dict):
        value = {1: "not a name"}
    with pytest.raises(InvalidRequestError) as caught:
        next(llm.stream([{"role": "user", "content": "x"}], **{name: value}))
    assert caught.value.param == name


@pytest.mark.parametrize("value", [None, 7, b"text", ["text"]])
def test_only_text_is_encoded(llm, value):
    with pytest.raises(InvalidRequestError) as caught:
        llm.encode(value)
    assert caught.value.param == "text"


@pytest.mark.parametrize("value", [None, 7, "text", [None], [1.5], [-1], [2**40], np.array([[1]])])
def test_only_token_ids_are_decoded(llm, value):
    with pytest.raises(InvalidRequestError) as caught:
        llm.decode(value)
    assert caught.value.param == "token_ids"


@pytest.mark.parametrize("value", [np.array([1, 2]), np.array([]), 0])
def test_arrays_are_no_user_and_no_salt(llm, value):
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate([1, 2], user=value, options=RequestOptions(user="u"))
    assert caught.value.param == "user"
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate({"prompt_token_ids": [1], "cache_salt": value})
    assert caught.value.param == "cache_salt"
