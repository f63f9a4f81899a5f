"""When to start again, what is taken for a hang, and the record of what was being computed."""

from __future__ import annotations

import os

import pytest

from llmkit.engine.process.messages import Heartbeat
from llmkit.engine.process.plan_record import PlanRecorder, new_record_file, read_record
from llmkit.engine.process.restarts import LONGEST_DELAY_S, Restarts
from llmkit.engine.process.watch import Watch


def crash(restarts, now):
    restarts.crashed(now)
    return restarts.next_delay()


class TestRestarts:
    def test_the_first_at_once_the_others_later_and_later(self):
        restarts = Restarts(5, 60)
        assert [crash(restarts, float(now)) for now in range(6)] == [0.0, 0.5, 1.0, 2.0, 4.0, None]
        assert restarts.count == 5

    def test_crashes_far_apart_are_borne_for_ever(self):
        restarts = Restarts(2, 60)
        assert [crash(restarts, now) for now in (0.0, 59.0, 61.0, 130.0, 190.0)] == [0.0, 0.5, 0.5, 0.0, 0.0]

    def test_the_delay_has_a_limit(self):
        restarts = Restarts(20, 1e6)
        assert max(crash(restarts, float(now)) for now in range(20)) == LONGEST_DELAY_S

    def test_none_at_all(self):
        assert crash(Restarts(0, 60), 0.0) is None
        restarts = Restarts(0, 60)
        restarts.crashed(0.0, ["a"])
        assert restarts.next_delay() is None

    def test_what_a_guilty_request_has_explained_does_not_count(self):
        restarts = Restarts(2, 60)
        for now in (1.0, 2.0):
            restarts.crashed(now, ["guilty", "other"])
        restarts.crashed(3.0, ["another"])
        restarts.crashed(4.0, ["guilty"])
        restarts.explained("guilty", wholly=True)
        assert restarts.next_delay() == 0.0

    def test_guilty_requests_one_after_the_other_make_it_wait_but_are_borne(self):
        restarts = Restarts(3, 60)
        delays = []
        for number in range(6):
            for _ in range(2):
                restarts.crashed(float(number), [f"r{number}"])
            restarts.explained(f"r{number}", wholly=False)
            delays.append(restarts.next_delay())
        assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0]
        assert restarts.num_unprovoked == 0

    def test_only_crashes_without_a_request_count(self):
        restarts = Restarts(1, 60)
        for now in range(5):
            restarts.crashed(float(now), ["a"])
        assert restarts.next_delay() is not None
        assert crash(restarts, 5.0) is not None
        restarts.crashed(6.0, ["a"])
        assert restarts.next_delay() is not None
        assert crash(restarts, 7.0) is None
        assert restarts.num_unprovoked == 2

    def test_crashes_of_which_nobody_is_found_guilty_are_a_riddle(self):
        restarts = Restarts(2, 60)
        found = []
        for now in range(7):
            restarts.crashed(float(now), ["a"])
            found.append(restarts.take_riddle())
        assert found == [False, False, True, False, False, True, False]
        restarts.explained("a", wholly=True)
        restarts.crashed(8.0, ["b"])
        assert not restarts.take_riddle()


class TestWatch:
    def watch(self):
        return Watch(silence_limit_s=30.0, step_limit_s=300.0, heard=100.0)

    def test_silence(self):
        watch = self.watch()
        assert watch.problem(130.0) is None
        assert "no sign of life for 31 s" in watch.problem(131.0)
        watch.heartbeat(Heartbeat("", 0.0), 131.0)
        assert watch.problem(160.0) is None

    def test_a_long_step_is_no_hang_until_the_limit(self):
        watch = self.watch()
        watch.heartbeat(Heartbeat("step", 250.0), 400.0)
        assert watch.problem(420.0) is None
        watch.heartbeat(Heartbeat("step", 295.0), 445.0)
        assert "(step) for 305 s" in watch.problem(455.0)

    def test_loading_takes_its_time(self):
        watch = self.watch()
        watch.heartbeat(Heartbeat("loading", 5000.0, bounded=False), 5100.0)
        assert watch.problem(5101.0) is None
        assert watch.progressed == 5100.0
        assert watch.problem(5131.0) is not None

    def test_an_output_is_the_end_of_a_step(self):
        watch = self.watch()
        watch.heartbeat(Heartbeat("step", 299.0), 400.0)
        watch.sign(401.0)
        assert watch.problem(410.0) is None

    def test_an_engine_that_sleeps_or_waits_is_not_stuck(self):
        watch = self.watch()
        watch.heartbeat(Heartbeat("", 0.0), 500.0)
        assert watch.progressed == 500.0
        watch.heartbeat(Heartbeat("step", 3.0), 600.0)
        assert watch.progressed == 597.0

    def test_an_idle_process_may_have_been_silent(self):
        watch = self.watch()
        watch.pending_since(1000.0)
        assert watch.problem(1020.0) is None


class Row:
    def __init__(self, request_id):
        self.request_id = request_id


class TestPlanRecord:
    @pytest.fixture
    def fd(self):
        fd = new_record_file()
        yield fd
        os.close(fd)

    def test_nothing_yet(self, fd):
        assert read_record(fd) == []

    def test_the_steps_under_way(self, fd):
        a, b, c = map(Row, "abc")
        recorder = PlanRecorder(fd)
        recorder.note([a, b])
        assert sorted(read_record(fd)) == ["a", "b"]
        recorder.note([b, c])
        assert sorted(read_record(fd)) == ["a", "b", "c"]  # the step before may still be running
        recorder.note([b, c])
        assert sorted(read_record(fd)) == ["b", "c"]
        recorder.clear()
        assert read_record(fd) == []

    def test_what_is_being_taken_in(self, fd):
        rows = [Row("a")]
        recorder = PlanRecorder(fd)
        recorder.note(rows)
        recorder.take_in([])
        assert read_record(fd) == ["a"]
        recorder.take_in(["b", "c"])
        assert sorted(read_record(fd)) == ["a", "b", "c"]
        recorder.note(rows)  # b and c wait: whoever was taken in is not computed yet
        assert read_record(fd) == ["a"]
        recorder.clear()
        recorder.take_in(["d"])
        assert read_record(fd) == ["d"]
        recorder.clear()
        assert read_record(fd) == []

    def test_the_same_requests_cost_no_write(self, fd, monkeypatch):
        rows = [Row("a")]
        recorder = PlanRecorder(fd)
        for _ in range(2):
            recorder.note(rows)
        monkeypatch.setattr(os, "pwrite", lambda *_: pytest.fail("written"))
        recorder.note(list(rows))

    def test_a_record_that_was_broken_off_does_not_count(self, fd):
        recorder = PlanRecorder(fd)
        recorder.note([Row("a")])
        recorder.note([Row("b")])
        os.pwrite(fd, b"\xff", 20)  # in the data of the second, which stands at the beginning
        assert read_record(fd) == ["a"]
