from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from llmkit_connectors.offload.block_key import BlockKey
from llmkit_connectors.offload.lookups import FileLookups


class Files:
    """A storage that answers when it is let."""

    def __init__(self) -> None:
        self.there: set[bytes] = set()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.num_searches = 0

    def find(self, spaces: Any, group: int, hashes: Any, *, only_leading: bool) -> list[bytes]:  # noqa: ARG002
        self.may_answer.wait(10)
        self.num_searches += 1
        if not hashes[0]:
            raise RuntimeError("this storage is broken")
        return [one for one in hashes if one in self.there]


@pytest.fixture
def files() -> Files:
    return Files()


def answer(lookups: FileLookups, number: int, hashes: list[bytes]) -> Any:
    deadline = time.monotonic() + 10
    while (found := lookups.ask(number, [b""], hashes)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return found


def test_an_answer_comes_later_and_holds_for_a_while(files: Files, clock: Any):
    lookups = FileLookups(files, [True], clock)
    files.there = {b"1", b"2"}
    files.may_answer.clear()
    assert lookups.ask(7, [b""], [b"1", b"2", b"3"]) is None
    assert lookups.is_pending(7)
    assert lookups.ask(7, [b""], [b"1", b"2", b"3"]) is None
    files.may_answer.set()
    assert answer(lookups, 7, [b"1", b"2", b"3"]) == ({b"1", b"2"},)
    assert not lookups.is_pending(7)
    assert files.num_searches == 1
    files.there = {b"1"}
    assert lookups.ask(7, [b""], [b"1", b"2", b"3"]) == ({b"1", b"2"},)
    clock.now += 11
    assert answer(lookups, 7, [b"1", b"2", b"3"]) == ({b"1"},)
    lookups.close()


def test_another_question_of_the_same_sequence_gets_an_answer_of_its_own(files: Files, clock: Any):
    lookups = FileLookups(files, [True], clock)
    files.there = {b"1", b"2"}
    assert answer(lookups, 7, [b"1", b"2"]) == ({b"1", b"2"},)
    assert lookups.ask(7, [b""], [b"2"]) == ({b"1", b"2"},)  # the end of what it has asked
    assert files.num_searches == 1
    assert answer(lookups, 7, [b"0", b"1", b"2"]) == ({b"1", b"2"},)
    assert answer(lookups, 7, [b"1", b"3"]) == ({b"1"},)
    assert files.num_searches == 3
    lookups.forget(7)
    files.there = set()
    assert answer(lookups, 7, [b"1", b"3"]) == (frozenset(),)
    lookups.clear()
    lookups.close()


def test_a_storage_that_fails_has_nothing(files: Files, clock: Any, caplog: pytest.LogCaptureFixture):
    lookups = FileLookups(files, [True, False], clock)
    assert answer(lookups, 7, [b""]) == (frozenset(), frozenset())
    lookups._threads.close(10.0)
    assert "broken" in caplog.text


def test_distrusted_blocks_are_left_out_for_a_minute(files: Files, clock: Any):
    lookups = FileLookups(files, [True, True], clock)
    files.there = {b"1", b"2"}
    lookups.distrust(BlockKey(1, b"2"))
    assert answer(lookups, 7, [b"1", b"2"]) == ({b"1", b"2"}, {b"1"})
    clock.now += 61
    assert answer(lookups, 7, [b"1", b"2"]) == ({b"1", b"2"}, {b"1", b"2"})
    lookups.close()
