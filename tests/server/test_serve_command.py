"""`llmkit serve` as a process: its start, its refusals, its end."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import time

import httpx
import pytest

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "eos_token_id": 5,
}
FLAGS = ["--load-format", "dummy", "--hf-overrides", json.dumps(MODEL), "--dtype", "float32", "--num-blocks", "300"]
FLAGS += ["--num-threads", "1", "--served-model-name", "tiny"]
LONG = {"prompt": [1, 2, 3], "max_tokens": 3000, "ignore_eos": True, "stream": True, "return_token_ids": True}


@pytest.fixture
def start(tmp_path):
    """Starts a server on a Unix socket; the process and a client. What it keeps on disk is in tmp_path/tmp."""
    processes = []
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    def run(*flags):
        path = tmp_path / "s"
        command = [sys.executable, "-m", "llmkit_cli", "serve", *FLAGS, "--uds", str(path), *flags]
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(temporary)}
        )
        processes.append(process)
        while "Serving tiny at unix:" not in (line := process.stderr.readline()):
            assert line, f"the server ended with {process.wait()}"
        client = httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server", timeout=60)
        return process, client

    yield run
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.stderr.close()
        process.wait()


@pytest.fixture(autouse=True)
def _logs_as_before():
    """The command sets up the log of its process."""
    names = ("llmkit", "llmkit.server.access", "uvicorn.error")
    root, loggers = logging.getLogger(), [logging.getLogger(name) for name in names]
    handlers, levels = list(root.handlers), [root.level, *(logger.level for logger in loggers)]
    yield
    root.handlers[:] = handlers
    for logger, level in zip([root, *loggers], levels, strict=True):
        logger.setLevel(level)


def read_tokens(response):
    lines = [line for line in response.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    return sum(len(choice["token_ids"]) for choice in choices), choices[-1]["finish_reason"]


def test_sigterm_lets_a_stream_finish_and_leaves_nothing(start, tmp_path):
    process, client = start("--log-format", "json")
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    with client, client.stream("POST", "/v1/completions", json=LONG | {"max_tokens": 1000}) as response:
        process.send_signal(signal.SIGTERM)
        assert read_tokens(response) == (1000, "length")
    assert process.wait(60) == 0
    assert not (tmp_path / "s").exists()
    assert list((tmp_path / "tmp").iterdir()) == []
    access = [json.loads(line) for line in process.stderr.read().splitlines() if "llmkit.server.access" in line]
    assert [(line["path"], line["status"]) for line in access] == [("/v1/completions", 200)]


def test_a_second_signal_ends_at_once(start, tmp_path):
    process, client = start()
    with client, client.stream("POST", "/v1/completions", json=LONG | {"n": 16}) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        while True:  # the first signal is being heeded once new connections are refused
            try:
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.connect(str(tmp_path / "s"))
            except OSError:
                break
            time.sleep(0.01)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "80a"], "server.port"),
        (["--port", "70000"], "server.port"),
        (["--ssl-keyfile", "missing.pem"], "ssl_certfile"),
        (["--ssl-certfile", "missing.pem"], "ssl_certfile"),
        (["--middleware", "no_such_module:x"], "no_such_module"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["--root-path", "proxy/"], "server.root_path"),
        (["--max-queue", "-1"], "server.max_queue"),
    ],
)
def test_settings_that_cannot_work(flags, words, capsys):
    """Refused in one paragraph."""
    from llmkit_cli.main import main

    with pytest.raises(SystemExit) as ended:
        main(["serve", *FLAGS, *flags])
    error = capsys.readouterr().err
    assert ended.value.code != 0
    assert words in error
    assert "Traceback" not in error


def test_parsers_ports_and_paths_that_cannot_be_used(tmp_path, capsys, monkeypatch):
    """Found before the model is looked at."""
    from llmkit_cli.main import main

    monkeypatch.setattr("llmkit_server.run.AsyncLLM", None)
    for flag in ("--tool-call-parser", "--reasoning-parser"):
        with pytest.raises(SystemExit):
            main(["serve", *FLAGS, flag, "none-such"])
        assert "none-such" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for flags in (["--port", port], ["--uds", str(tmp_path)]):
            with pytest.raises(SystemExit) as ended:
                main(["serve", *FLAGS, *flags])
            assert ended.value.code == 2
            assert flags[1] in capsys.readouterr().err
    assert tmp_path.is_dir()


def test_the_socket_of_a_dead_server_is_taken_over_and_that_of_a_living_one_is_not(tmp_path):
    from llmkit.config import ServerConfig
    from llmkit.errors import ConfigError
    from llmkit_server.listening import bound_socket

    settings = ServerConfig(uds=str(tmp_path / "s"))
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(settings.uds)
    with bound_socket(settings):
        with pytest.raises(ConfigError, match="another server"), bound_socket(settings):
            pass
        assert (tmp_path / "s").exists()
    assert not (tmp_path / "s").exists()


def test_a_dry_run_loads_nothing(capsys):
    from llmkit_cli.main import main

    with pytest.raises(SystemExit) as ended:
        main(["serve", *FLAGS, "--dry-run"])
    assert ended.value.code in (0, None)
    assert "memory" in capsys.readouterr().out
