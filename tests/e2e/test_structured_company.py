"""Structured output beside everything else that a request may have or meet, with real engines and the real model."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmkit import LLM, RequestOutput, SamplingParams
from llmkit.registry import Registry
from llmkit.testing import hostile_grammars

pytest.importorskip("xgrammar")
jsonschema = pytest.importorskip("jsonschema")

PROMPTS = ["A list of animals: ", "Colours, as JSON: ", "Towns and rivers: "]
WORDS = {"type": "array", "items": {"type": "string", "minLength": 20, "maxLength": 22}, "minItems": 2, "maxItems": 2}
NAME = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}


def params_of(constraint: dict[str, Any], **params: Any) -> SamplingParams:
    defaults: dict[str, Any] = {"temperature": 0, "max_tokens": 80}
    return SamplingParams(structured_outputs=constraint, **defaults | params)


def texts(outputs: list[RequestOutput]) -> list[str]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    assert {one.finish_reason for output in outputs for one in output.outputs} == {"stop"}
    return [one.text for output in outputs for one in output.outputs]


@pytest.fixture(scope="module")
def unhurried(llm: LLM) -> list[str]:
    """What is answered where there is room for everybody."""
    return texts(llm.generate(PROMPTS, params_of({"json": WORDS})))


@pytest.mark.parametrize(("scheduler", "swaps"), [("fcfs", False), ("classic", True)])
def test_preemption_by_recomputation_and_by_swap_changes_nothing(
    make_llm: Callable[..., LLM], unhurried: list[str], scheduler: str, swaps: bool
) -> None:
    for text in unhurried:
        jsonschema.validate(json.loads(text), WORDS)
    llm = make_llm(num_blocks=6, max_model_len=96, scheduler=scheduler)
    assert texts(llm.generate(PROMPTS, params_of({"json": WORDS}))) == unhurried
    stats = llm.stats()
    assert stats.num_preemptions > 0
    assert stats.num_swaps == (stats.num_preemptions if swaps else 0)
    assert stats.num_free_blocks == stats.num_blocks


def test_min_tokens_hold_the_end_back_while_the_text_can_go_on(llm: LLM) -> None:
    """And a stop string before them; where the text cannot go on, it ends."""
    wants_to_end = {"logit_bias": {2: 100.0}}
    sooner = llm.generate("ha ", params_of({"regex": "(ha )+"}, **wants_to_end))[0].outputs[0]
    later = llm.generate("ha ", params_of({"regex": "(ha )+"}, min_tokens=9, **wants_to_end))[0].outputs[0]
    assert sooner.finish_reason == later.finish_reason == "stop"
    assert len(sooner.token_ids) < 9 <= len(later.token_ids)
    assert set(later.text.split(" ")) == {"ha", ""}
    stopped = llm.generate("ha ", params_of({"regex": "(ha )+"}, min_tokens=9, stop=["ha ha"]))[0].outputs[0]
    assert stopped.stop_reason == "ha ha"
    assert len(stopped.token_ids) >= 9
    whole = llm.generate("ha ", params_of({"regex": "(ha ){2}"}, min_tokens=50))[0].outputs[0]
    assert (whole.text, whole.finish_reason) == ("ha ha ", "stop")


def test_log_probabilities_of_several_sequences(llm: LLM) -> None:
    """Every sampled token is possible, and no alternative is better than it under greedy sampling."""
    greedy = llm.generate(PROMPTS[0], params_of({"json": NAME}, logprobs=5))[0].outputs[0]
    many = llm.generate(PROMPTS[0], params_of({"json": NAME}, n=3, seed=1, temperature=1.0, logprobs=5))[0].outputs
    for one in (greedy, *many):
        jsonschema.validate(json.loads(one.text), NAME)
        assert one.logprobs is not None
        assert len(one.logprobs) == len(one.token_ids)
        for token_id, entry in zip(one.token_ids, one.logprobs, strict=True):
            assert entry.token_ids[0] == token_id
            assert math.isfinite(entry.logprobs[0])
            assert not any(math.isnan(value) for value in entry.logprobs)
    assert greedy.logprobs is not None
    assert all(entry.ranks[0] == 1 for entry in greedy.logprobs)


def test_the_only_possible_token_is_certain(llm: LLM) -> None:
    entries = llm.generate("Is it? ", params_of({"regex": "q"}, logprobs=5))[0].outputs[0].logprobs
    assert entries is not None
    assert entries[0].logprobs[0] == pytest.approx(0.0, abs=1e-6)
    assert set(entries[0].logprobs[2:]) == {-math.inf}  # impossible: the mask has left one token


@pytest.mark.parametrize("act", ["!mask", "!panic", "!deny", "!load", "!segfault"])
def test_a_fault_in_the_grammar_ends_its_request_alone(hostile: LLM, facts: Any, act: str) -> None:
    """Wherever it happens: beside it a plain request and a good one are answered as ever."""
    bad, good = params_of({"choice": [act, act + "!"]}), params_of({"choice": ["yes"]})
    plain = SamplingParams(temperature=0, max_tokens=12)
    outputs = hostile.generate([facts.g1, facts.g1, facts.g1], [bad, good, plain])
    assert outputs[0].outputs[0].finish_reason == "error"
    assert "hostile" in str(outputs[0].error)
    assert outputs[1].outputs[0].text == "yes"
    assert outputs[2].outputs[0].token_ids == facts.g1_ids


@pytest.fixture(scope="module")
def hostile(smollm2_gguf: Path, settings: dict[str, Any]) -> Any:
    """An engine whose grammars misbehave on demand."""
    registry = Registry.discover()
    registry.register("structured", "hostile", hostile_grammars)
    with LLM(smollm2_gguf, registry=registry, **settings, structured="hostile") as llm:
        yield llm


def test_who_goes_away_leaves_nobody_compiling(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.generate("Yes? ", params_of({"choice": ["yes"]}))
    core = llm.engine.core
    gate = core.scheduler.grammars
    pid = gate._service.process.pid  # type: ignore[union-attr]
    children = Path(f"/proc/{pid}/task/{pid}/children")
    wait = gate.wait

    def interrupted(timeout_s: float) -> None:
        if children.read_text().split():
            raise KeyboardInterrupt
        wait(timeout_s)

    endless = params_of({"json": {"type": "string", "pattern": "(b{1,500}){1,500}"}})
    with monkeypatch.context() as patch:
        patch.setattr(gate, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("JSON: ", endless)
    deadline = time.monotonic() + 10
    while children.read_text().split():
        assert time.monotonic() < deadline, "the child compiles for nobody"
        time.sleep(0.01)
    assert texts(llm.generate("Yes? ", params_of({"choice": ["yes"]}))) == ["yes"]
