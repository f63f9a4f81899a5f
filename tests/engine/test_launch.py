"""Steps that are launched before the outputs of the last one are told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from llmkit.engine.client import InlineClient
from llmkit.testing.scheduling import SchedulingHarness
from llmkit_schedulers.fcfs import FcfsPolicy


@pytest.mark.parametrize("depth", [1, 2])
def test_outputs_are_told_with_the_next_steps_under_way(depth):
    run = SchedulingHarness(FcfsPolicy(), max_concurrent_steps=depth)
    plans = []
    run.core.on_plan = plans.append
    client = InlineClient(SimpleNamespace(core=run.core))
    run.add("a", [1, 2, 3], 6)
    told = []
    while client.has_work():
        told += [token for output in client.outputs() for token in output.new_token_ids]
        if 0 < len(told) < 6:  # on its way is what the pipeline takes, up to the last token
            assert len(plans) == min(len(told) + (depth if depth > 1 else 0), 6)
    assert len(told) == 6


def test_a_launch_that_is_broken_off_ends_all_requests(monkeypatch):
    run = SchedulingHarness(FcfsPolicy(), max_concurrent_steps=2)
    run.add("a", [1, 2, 3], 6)
    run.step()

    def struck():
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run.core.scheduler, "plan", struck)
        with pytest.raises(KeyboardInterrupt):
            run.core.launch()
    run.run()
    assert run.answers["a", 0].finish_reason == "error"


def test_outputs_are_told_even_if_the_next_step_cannot_be_launched(monkeypatch):
    run = SchedulingHarness(FcfsPolicy(), max_concurrent_steps=2)
    client = InlineClient(SimpleNamespace(core=run.core))
    run.add("a", [1, 2, 3], 1)
    run.add("b", [1, 2, 3], 6)

    def broken():
        raise RuntimeError("no plan")

    with monkeypatch.context() as patched:
        plan = run.core.scheduler.plan
        plans = iter([plan, plan, broken])
        patched.setattr(run.core.scheduler, "plan", lambda: next(plans)())
        told = client.outputs()
    assert [output.finish_reason for output in told if output.request_id == "a"] == ["length"]
    later = [output for output in client.outputs() if output.request_id == "b"]
    assert [output.error for output in later] == ["The step was broken off: RuntimeError: no plan"]
    run.core.close()
    run.core.launch()  # closed by whoever was told: nothing to do


@pytest.mark.parametrize("depth", [1, 2])
def test_an_interrupt_while_one_is_noted_loses_nothing(depth, monkeypatch):
    run = SchedulingHarness(FcfsPolicy(), max_concurrent_steps=depth)
    run.add("a", [1, 2, 3], 6)

    def struck(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run.core.executor, "submit", struck)
        patched.setattr("llmkit.engine.core.described", struck)
        with pytest.raises(KeyboardInterrupt):
            run.core.step()
    run.run()
    assert run.answers["a", 0].error == "The step was broken off."
    run.add("b", [1, 2, 3], 6)
    run.run()
    assert run.answers["b", 0].finish_reason == "length"
