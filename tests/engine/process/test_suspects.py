"""Finding the request that kills the process."""

from __future__ import annotations

import pytest

from llmkit.engine.process.journal import Journal
from llmkit.engine.process.suspects import CLEARED_TOKENS, Suspects
from llmkit.requests.message import EngineOutput


@pytest.fixture
def journal(request_of):
    journal = Journal()
    for name in "abcd":
        journal.add(request_of(name, 100)).sent = 1
    return journal


@pytest.fixture
def told(journal):
    """told(name, count): the request has produced so many tokens more."""

    def note(name, count):
        journal.get(name).sent = 1
        journal.note([EngineOutput(request_id=name, index=0, new_token_ids=[1] * count)], seen=1)

    return note


def crash(journal, suspects, running):
    guilty = suspects.crashed(running)
    if guilty is not None:
        journal.remove(guilty.request_id)
    for entry in journal:
        entry.sent = None
    admitted = suspects.admitted()
    for entry in admitted:
        entry.sent = 1
    return None if guilty is None else guilty.request_id, [entry.request_id for entry in admitted]


def test_one_crash_condemns_nobody(journal):
    suspects = Suspects(journal)
    assert crash(journal, suspects, ["a"]) == (None, list("abcd"))
    assert not suspects.any_on_trial


def test_whoever_was_alone_in_the_second_crash_is_guilty(journal):
    suspects = Suspects(journal)
    crash(journal, suspects, ["a", "b"])
    assert crash(journal, suspects, ["b"]) == ("b", ["a", "c", "d"])


def test_the_only_suspect_in_company_is_tried_first(journal):
    suspects = Suspects(journal)
    crash(journal, suspects, ["a", "b"])
    assert crash(journal, suspects, ["b", "c"]) == (None, ["b"])
    assert crash(journal, suspects, ["b"]) == (None, ["b"])
    assert crash(journal, suspects, ["b"]) == ("b", ["a", "c", "d"])


def test_several_in_two_crashes_are_tried_one_by_one(journal):
    suspects = Suspects(journal)
    crash(journal, suspects, "abc")
    assert crash(journal, suspects, "abc") == (None, ["a"])
    assert suspects.any_on_trial
    assert suspects.admitted() == []
    journal.get("a").token_ids[0] += [1] * (CLEARED_TOKENS + 1)
    (tried,) = suspects.admitted()
    assert tried.request_id == "b"
    tried.sent = 1
    assert crash(journal, suspects, "ab") == (None, ["b"])
    assert crash(journal, suspects, "b") == ("b", ["c"])
    journal.get("c").token_ids[0] += [1] * (CLEARED_TOKENS + 1)
    assert [entry.request_id for entry in suspects.admitted()] == ["a", "d"]


def test_kills_from_outside_that_meet_another_one_on_trial_each_time(journal):
    """A restart takes longer than the time between kills: nobody but the one on trial comes further."""
    suspects = Suspects(journal)
    crash(journal, suspects, "abcd")
    for _ in range(40):
        guilty, tried = crash(journal, suspects, [entry.request_id for entry in journal if entry.sent is not None])
        assert guilty is None
        journal.get(tried[0]).token_ids[0] += [1] * (CLEARED_TOKENS + 1)
        for entry in suspects.admitted():
            entry.sent = 1
    assert all(entry.num_tokens > 5 * CLEARED_TOKENS for entry in journal)


def test_the_next_is_tried_when_the_one_on_trial_has_ended(journal):
    suspects = Suspects(journal)
    crash(journal, suspects, "ab")
    crash(journal, suspects, "ab")
    journal.remove("a")
    assert [entry.request_id for entry in suspects.admitted()] == ["b"]


def test_whoever_has_come_further_is_cleared(journal):
    suspects = Suspects(journal)
    for _ in range(5):
        assert crash(journal, suspects, "abcd") == (None, list("abcd"))
        for entry in journal:
            entry.token_ids[0] += [1] * (CLEARED_TOKENS + 1)


def test_too_few_tokens_clear_nobody(journal):
    suspects = Suspects(journal)
    crash(journal, suspects, "a")
    journal.get("a").token_ids[0] += [1] * CLEARED_TOKENS
    assert crash(journal, suspects, "a")[0] == "a"


def test_an_engine_that_goes_on_for_others_is_not_broken(journal, told):
    suspects = Suspects(journal)
    told("a", 3)
    told("b", 7)
    crash(journal, suspects, "ab")
    told("b", 3)
    crash(journal, suspects, "ab")
    assert suspects.others_went_on(journal.get("a"))
    assert not suspects.others_went_on(journal.get("b"))
    told("b", 5)  # cleared: what was before does not count any more
    crash(journal, suspects, "ab")
    assert not suspects.others_went_on(journal.get("b"))
    told("c", 1)
    assert suspects.others_went_on(journal.get("b"))


def test_all_that_the_process_had_can_be_tried(journal, told):
    """Whoever kills is part of no step: others, who are, come further between the crashes."""
    suspects = Suspects(journal)
    journal.get("d").sent = None
    crash(journal, suspects, "ab")
    journal.get("c").sent, journal.get("d").sent = 1, None
    suspects.suspect_all_sent()
    for entry in journal:
        entry.sent = None
    tried = []
    while suspects.any_on_trial and (admitted := suspects.admitted()):
        (entry,) = admitted
        tried.append(entry.request_id)
        told(entry.request_id, CLEARED_TOKENS + 1)
        if len(tried) == 3:
            break
    assert tried == ["a", "b", "c"]
    assert [entry.request_id for entry in suspects.admitted()] == ["d"]


def test_requests_that_are_gone_are_no_suspects(journal):
    assert Suspects(journal).crashed(["gone"]) is None
