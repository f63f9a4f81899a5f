"""How the engine process begins and ends, and what is left behind: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from llmkit.config import EngineConfig
from llmkit.config.sections import ProcessConfig
from llmkit.engine.process import messages
from llmkit.engine.process.engine_process import Launch, socket_folder
from llmkit.engine.process_client import SupervisedClient
from llmkit.errors import ConfigError, EngineClosedError, EngineDeadError, EngineError, ModelError, OutOfMemoryError
from llmkit.testing.fake_engine import FakeBuilder, fake_tokens


def client(builder, **settings):
    return SupervisedClient(Launch(messages.dumped(builder)), EngineConfig(process=ProcessConfig(**settings)))


def gone(pid, seconds=10.0):
    """Whether the process has ended, at the latest after so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


@pytest.fixture(autouse=True)
def _own_temporary_folder(monkeypatch, tmp_path_factory):
    """Other tests, beside these, have folders in the one that all share. Short, unlike tmp_path, for sockets."""
    tmp_path_factory.getbasetemp()  # made where it belongs, before the folder changes
    with tempfile.TemporaryDirectory(prefix="own-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


def left_behind():
    return set(Path(tempfile.gettempdir()).iterdir())


def nothing_new(before, seconds=10.0):
    """Whether all that was not there before has gone, at the latest after so many seconds."""
    deadline = time.monotonic() + seconds
    while left_behind() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    return not left_behind() - before


class TestStart:
    @pytest.mark.parametrize(
        "error",
        [
            ConfigError("This setting is bad.", hint="Use another."),
            ModelError("The model is damaged."),
            OutOfMemoryError("It does not fit."),
        ],
    )
    def test_the_engines_own_error_is_raised(self, error):
        before = left_behind()
        with pytest.raises(type(error)) as caught:
            client(FakeBuilder(error=error)).start()
        assert str(caught.value) == str(error)
        assert nothing_new(before)

    def test_an_unexpected_error_keeps_its_words(self, capfd):
        with pytest.raises(EngineError, match="could not be started: ZeroDivisionError: by nothing"):
            client(FakeBuilder(error=ZeroDivisionError("by nothing"))).start()
        assert "Traceback" in capfd.readouterr().err

    def test_a_death_without_a_word_is_told_with_the_end_of_the_log(self, tmp_path):
        (tmp_path / "broken").touch()
        with pytest.raises(EngineError) as caught:
            client(FakeBuilder(broken=str(tmp_path / "broken"))).start()
        assert "was killed by signal 11 (SIGSEGV) while it was starting" in str(caught.value)
        assert "the device is on fire" in str(caught.value)

    def test_an_import_that_fails_is_told(self, monkeypatch):
        monkeypatch.setattr("sys.path", [])  # nothing can be imported in the process
        with pytest.raises(EngineError, match="ended with status 1 while it was starting") as caught:
            client(FakeBuilder()).start()
        assert "No module named" in str(caught.value)

    def test_an_interpreter_that_is_missing_is_told(self, monkeypatch):
        monkeypatch.setattr("sys.executable", "/nowhere/python")
        with pytest.raises(EngineError, match="could not be started"):
            client(FakeBuilder()).start()

    def test_progress_is_told_in_the_callers_thread(self):
        import threading

        told = []
        running = client(FakeBuilder())
        running.start(lambda done, total: told.append((done, total, threading.current_thread().name)))
        running.close()
        assert told == [(0, 100, "MainThread"), (100, 100, "MainThread")]

    def test_an_interrupt_while_it_loads_ends_the_process(self):
        running = client(FakeBuilder(load_s=60))

        def interrupt(_done, _total):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            running.start(interrupt)
        assert running.pid is None

    def test_a_silent_start_is_given_up(self):
        with pytest.raises(EngineError, match="no sign of life"):
            client(FakeBuilder(frozen=True), heartbeat_s=0.1, heartbeat_timeout_s=0.5).start()


class TestEnd:
    def test_the_engine_is_closed_and_nothing_is_left(self, tmp_path, request_of):
        before = left_behind()
        running = client(FakeBuilder(closed=str(tmp_path / "closed")))
        running.start()
        assert nothing_new(before)  # not even while it runs
        pid = running.pid
        running.add([request_of("a", 5)])
        tokens = []
        while running.has_work():
            tokens += [token for output in running.outputs() for token in output.new_token_ids]
        assert tokens == fake_tokens((1, 2), 0, 5)
        assert running.outputs() == []
        assert running.stats().num_unfinished == 0
        running.close()
        running.close()
        assert gone(pid)
        assert (tmp_path / "closed").exists()
        with pytest.raises(EngineClosedError):
            running.add([request_of("b")])

    def test_one_that_does_not_end_is_killed(self, request_of):
        running = client(FakeBuilder(), stop_timeout_s=0.2)
        running.start()
        pid = running.pid
        running.add([request_of("a", extra_args={"fault": "hang", "at": 1})])
        assert len(running.outputs()) == 1
        running.close()
        assert gone(pid)

    def test_waiting_callers_learn_that_it_is_dead(self, tmp_path, request_of):
        running = client(FakeBuilder(broken=str(tmp_path / "broken")), max_restarts=0)
        running.start()
        running.add([request_of("a", 10, extra_args={"fault": "kill", "at": 1})])
        assert len(running.outputs()) == 1
        with pytest.raises(EngineDeadError, match="crashed once and is not started again"):
            running.outputs()
        with pytest.raises(EngineDeadError):
            running.outputs()
        running.close()

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    def test_an_orphan_ends_itself(self, number, tmp_path):
        before = left_behind()
        parent, pid = self._parent(tmp_path, "import time; time.sleep(600)")
        parent.send_signal(number)
        parent.wait()
        assert gone(pid)
        assert (tmp_path / "closed").exists()  # in good order
        assert nothing_new(before)

    def test_an_orphan_in_the_middle_of_a_step_ends_itself(self, tmp_path):
        work = "client.add([request('a', extra_args={'fault': 'hang'})]); import time; time.sleep(600)"
        parent, pid = self._parent(tmp_path, work)
        parent.kill()
        parent.wait()
        assert gone(pid)

    def test_an_orphan_that_is_still_starting_leaves_no_folder(self, tmp_path):
        before = left_behind()
        parent, pid = self._parent(tmp_path, "", load_s=60)
        parent.kill()
        parent.wait()
        assert gone(pid)
        assert nothing_new(before)

    def test_a_program_that_forgets_to_close_leaves_nothing(self, tmp_path):
        parent, pid = self._parent(tmp_path, "")
        assert parent.wait(20) == 0
        assert gone(pid)
        assert (tmp_path / "closed").exists()

    def _parent(self, tmp_path, work, load_s=0.0):
        """A program that starts an engine process, and the id of that."""
        program = f"""
            import sys, threading
            from llmkit.config import EngineConfig
            from llmkit.engine.process import messages
            from llmkit.engine.process.engine_process import Launch
            from llmkit.engine.process_client import SupervisedClient
            from llmkit.requests.message import EngineRequest
            from llmkit.requests.sampling_params import SamplingParams
            from llmkit.testing.fake_engine import FakeBuilder
            def request(name, **fields):
                params = SamplingParams(seed=0, **fields)
                return EngineRequest(request_id=name, prompt_token_ids=[1], max_tokens=9, sampling_params=params)
            builder = FakeBuilder(closed={str(tmp_path / "closed")!r}, load_s={load_s})
            client = SupervisedClient(Launch(messages.dumped(builder)), EngineConfig())
            client.start(lambda done, total: print(client.pid, flush=True) if done == 0 else None)
            {work}
        """
        parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
        line = parent.stdout.readline()
        parent.stdout.close()
        return parent, int(line)


class TestSurroundings:
    def test_the_folder_of_the_sockets_is_private_and_short(self, tmp_path, monkeypatch):
        long = tmp_path / ("x" * 90)
        long.mkdir()
        for folder in (str(tmp_path), str(long)):
            monkeypatch.setattr(tempfile, "tempdir", folder)
            made = socket_folder()
            try:
                assert os.stat(made).st_mode & 0o777 == 0o700
                assert len(made) < 100
            finally:
                os.rmdir(made)
        assert not list(long.iterdir())

    def test_its_log_says_whose_it_is(self, capfd, request_of):
        running = client(FakeBuilder())
        running.start()
        pid = running.pid
        running.add([request_of("a", extra_args={"fault": "raise", "at": 1}), request_of("b", 4)])
        while running.has_work() and running.stats().num_unfinished:
            pass
        running.close()
        log = capfd.readouterr().err
        assert f"[engine {pid}] ERROR llmkit.engine.process: a step was broken off" in log
        assert f"[engine {pid}] RuntimeError: this step is broken" in log
