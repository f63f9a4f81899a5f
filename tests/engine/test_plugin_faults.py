"""Faults of plugins of every guarded kind, at once, in a whole engine: all are counted and shown the same way."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from llmkit import LLM, SamplingParams
from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.registry import Registry, detect_environment
from llmkit.testing import hostile_grammars
from llmkit.testing.hostile_policy import HostilePolicy
from llmkit.testing.memory_connector import MemoryConnector, MemoryScheduler, MemoryStore

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}


class FailingScheduler(MemoryScheduler):
    def offer(self, request, num_computed_tokens):  # noqa: ARG002
        raise ValueError("no offers today")


class FailingConnector(MemoryConnector):
    def scheduler_half(self, context):
        return FailingScheduler(self._store, context, asynchronous=False)


def front_door(**hooks):
    return SimpleNamespace(
        info=PluginInfo("fails"), **{name: hookimpl(specname=name)(hook) for name, hook in hooks.items()}
    )


def fails(stats):
    raise KeyError(stats.step)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model without weights whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    alphabet = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    return folder


@pytest.fixture
def registry(monkeypatch, tmp_path):
    monkeypatch.setenv("LLMKIT_CACHE", str(tmp_path / "cache"))
    made = Registry.discover()
    made.register("scheduler", "bad", front_door(llmkit_scheduler_policy=lambda: HostilePolicy(3)))
    made.register("connector", "bad", front_door(llmkit_connector=lambda: FailingConnector(MemoryStore())))
    made.register("structured", "bad", hostile_grammars)
    made.register("extension", "bad", front_door(llmkit_step_finished=fails))
    return made


KINDS = {"scheduler", "connector", "structured", "extension"}
CHOSEN = {
    "scheduler": {"policy": "bad"},
    "connector": {"name": "bad"},
    "structured": {"backend": "bad"},
    "extensions": ["bad"],
    "kernels": "torch",
    "attention": {"backend": "torch"},
}


def test_all_guards_show_their_faults_alike(registry, model):
    plain = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    broken = SamplingParams(max_tokens=6, structured_outputs={"choice": ["!mask", "right"]})
    settings = {"load_format": "dummy", "num_blocks": 64, "num_threads": 1, "registry": registry}
    with LLM(str(model), **settings, **CHOSEN) as llm:
        assert llm.stats().plugin_faults == {}
        outputs = llm.generate(["x" * n for n in range(1, 11)], plain, use_tqdm=False)
        failed = llm.generate(["y"] * 6, broken, use_tqdm=False)
        outputs += llm.generate(["z"], plain, use_tqdm=False)
        faults = llm.stats().plugin_faults
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6] * 11
    assert {output.outputs[0].finish_reason for output in failed} == {"error"}
    assert set(faults) == {f"{kind}:bad" for kind in KINDS}
    for count in faults.values():
        assert count.state == "open"
        assert count.num_faults >= 5
    assert "no offers today" in faults["connector:bad"].last_fault
    assert "no mask today" in faults["structured:bad"].last_fault
    assert "KeyError" in faults["extension:bad"].last_fault
    noted = {row.kind: row.faults for row in registry.doctor(detect_environment()) if row.name == "bad"}
    assert set(noted) == KINDS
    for kind, record in noted.items():
        assert record is not None, kind
        assert (record.times, record.num_faults) == (1, 5)
