"""The record of unfinished requests."""

from __future__ import annotations

import pytest

from llmkit.engine.process.journal import Journal
from llmkit.requests.logprobs import PositionLogprobs
from llmkit.requests.message import EngineOutput, PriorOutput

ENTRY = PositionLogprobs([1], [-1.0], [1])


def output(name="a", tokens=(), index=0, **fields):
    return EngineOutput(request_id=name, index=index, new_token_ids=list(tokens), **fields)


@pytest.fixture
def journal(request_of):
    journal = Journal()
    for name, n in (("a", 1), ("b", 3)):
        journal.add(request_of(name, 8, n=n)).sent = 1
    return journal


def test_an_untouched_request_is_sent_again_as_it_was(journal):
    entry = journal.get("b")
    assert entry.resumption() is entry.request


def test_a_request_goes_on_after_what_each_sequence_has_told(journal):
    journal.note([output("b", [5, 6]), output("b", [7], 1), output("b", [8], 2, finish_reason="stop")], 1)
    journal.note([output("b", [9], 1)], 2)
    resumed = journal.get("b").resumption()
    assert resumed.prior_outputs == (PriorOutput((5, 6)), PriorOutput((7, 9)), PriorOutput((8,), "stop"))


def test_told_prompt_logprobs_are_counted(journal):
    journal.note([output(prompt_logprobs=[None, ENTRY])], 1)
    journal.note([output(prompt_logprobs=[ENTRY])], 1)
    resumed = journal.get("a").resumption()
    assert resumed.num_prior_prompt_logprobs == 3
    assert resumed.prior_outputs == (PriorOutput(),)


def test_a_resumed_request_that_is_resumed_again_keeps_all(journal):
    journal.note([output("b", [5])], 1)
    second = Journal()
    entry = second.add(journal.get("b").resumption())
    entry.sent = 1
    second.note([output("b", [6])], 1)
    assert entry.resumption().prior_outputs[0] == PriorOutput((5, 6))


def test_an_ended_request_is_forgotten(journal):
    passed = journal.note([output("a", [5], finish_reason="length"), output("a", [6])], 1)
    assert [news.new_token_ids for news in passed] == [[5]]
    assert journal.get("a") is None
    assert len(journal) == 1


def test_ended_sequences_are_not_heard_of_again(journal):
    journal.end_sequence("b", 1)
    assert journal.note([output("b", [5], 1)], 1) == []
    assert journal.get("b").resumption().prior_outputs[1].finish_reason == "abort"
    for name, index in (("b", 0), ("b", 2), ("b", 7), ("unknown", 0)):
        journal.end_sequence(name, index)
    assert journal.get("b") is None


def test_outputs_of_an_aborted_request_do_not_reach_the_next_of_that_name(journal, request_of):
    journal.remove("a")
    journal.add(request_of("a")).sent = 3
    assert journal.note([output("a", [5])], 2) == []  # written before the process had seen message 3
    assert len(journal.note([output("a", [6])], 3)) == 1


def test_outputs_before_it_was_sent_are_not_its_own(journal, request_of):
    journal.add(request_of("c"))
    assert journal.note([output("c", [5])], 9) == []


def test_an_id_in_use_is_refused(journal, request_of):
    assert journal.add(request_of("a")) is None


def test_nobody_sees_that_the_cache_was_empty_again(journal):
    journal.note([output(tokens=[5], num_cached_tokens=3, first_scheduled_time=1.0)], 1)
    journal.get("a").resumed = True
    (passed,) = journal.note([output(tokens=[6], num_cached_tokens=0, first_scheduled_time=9.0)], 1)
    assert (passed.num_cached_tokens, passed.first_scheduled_time) == (3, None)


def test_a_failure_ends_only_what_goes_on(journal):
    journal.note([output("b", [5], 1, finish_reason="stop")], 1)
    outputs = journal.get("b").failure("no more")
    assert [(o.index, o.finish_reason, o.error) for o in outputs] == [(0, "error", "no more"), (2, "error", "no more")]
