"""What `llmkit plugins doctor` knows of faults in engines that are gone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmkit.registry import PluginRow, Registry
from llmkit.registry.breaker import FaultCount
from llmkit.registry.fault_journal import KEPT_S, FaultJournal

ROW = PluginRow("scheduler", "a/b: c", "module", "llmkit-x", "1.0")
COUNT = FaultCount(5, "open", "peek() raised ValueError: no")


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def journal(tmp_path: Any, clock: Clock) -> FaultJournal:
    return FaultJournal(tmp_path / "faults", clock)


def test_the_last_faults_and_how_often(journal: FaultJournal, tmp_path: Any, clock: Clock) -> None:
    assert journal.find(ROW) is None
    journal.add(ROW, COUNT)
    clock.now += 60
    journal.add(ROW, replace(COUNT, num_faults=6, last_fault="pop() took 3.0 s"))
    found = FaultJournal(tmp_path / "faults", clock).find(ROW)
    assert found is not None
    assert (found.times, found.num_faults, found.last_fault, found.last_time) == (2, 6, "pop() took 3.0 s", 1e9 + 60)
    assert "left alone, 2 times, last on 2001-09-09" in found.describe()
    assert len(list((tmp_path / "faults").iterdir())) == 1


def test_another_version_or_distribution_is_innocent(journal: FaultJournal) -> None:
    journal.add(ROW, COUNT)
    assert journal.find(replace(ROW, version="1.1")) is None
    assert journal.find(replace(ROW, distribution="llmkit-y")) is None
    assert journal.find(replace(ROW, kind="connector")) is None


def test_old_faults_are_forgotten(journal: FaultJournal, clock: Clock) -> None:
    journal.add(ROW, COUNT)
    clock.now += KEPT_S
    assert journal.find(ROW) is None


@pytest.mark.parametrize("content", ["", "nonsense", "[]", "{}", '{"kind": 1}', "null", "\ud800"])
def test_a_damaged_file_is_no_record(journal: FaultJournal, tmp_path: Any, content: str) -> None:
    journal.add(ROW, COUNT)
    (file,) = (tmp_path / "faults").iterdir()
    file.write_bytes(content.encode(errors="surrogatepass"))
    assert journal.find(ROW) is None


def test_a_folder_that_cannot_be_made_disturbs_nobody(tmp_path: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    journal = FaultJournal(tmp_path / "file" / "faults")
    journal.add(ROW, COUNT)
    assert journal.find(ROW) is None
    assert journal.clear() == 0


def test_clear(journal: FaultJournal) -> None:
    journal.add(ROW, COUNT)
    assert journal.clear() == 1
    assert journal.find(ROW) is None


def test_an_engine_s_breakers_write_it_and_the_doctor_reads_it(site: Any, cpu: Any) -> None:
    site.add_policy("healthy")
    site.add_distribution("llmkit-sick", {"llmkit.schedulers": {"healthy": "healthy"}})
    registry = Registry.discover()
    registry.create("scheduler", "healthy", cpu)
    breaker = registry.breakers().of("scheduler", "healthy")
    for _ in range(5):
        breaker.record("peek() is wrong")
    rows = {row.name: row for row in Registry.discover().doctor(cpu) if row.kind == "scheduler"}
    assert rows["healthy"].faults is not None
    assert rows["healthy"].faults.last_fault == "peek() is wrong"
    assert rows["healthy"].usable
    assert rows["fcfs"].faults is None
