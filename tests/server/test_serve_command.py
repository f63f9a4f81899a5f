"""`llmkit serve` as a process: its start, its refusals, its end."""

from __future__ import annotations

import gzip
import json
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import psutil
import pytest
import tokenizers
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

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
FLAGS += ["--num-threads", "1", "--served-model-name", "tiny", "--attention", "torch", "--kernels", "torch"]
LONG = {"prompt": [1, 2, 3], "max_tokens": 3000, "ignore_eos": True, "stream": True, "return_token_ids": True}


@pytest.fixture
def start(tmp_path):
    """Starts a server on a Unix socket; the process and a client. What it keeps on disk is in tmp_path/tmp, its log in
    tmp_path/log: nobody reads a pipe while a test goes on, and a server would stop where it is full."""
    processes = []
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    def run(*flags):
        path, log = tmp_path / "s", tmp_path / "log"
        command = [sys.executable, "-m", "llmkit_cli", "serve", *FLAGS, "--uds", str(path), *flags]
        with log.open("w") as stderr:
            process = subprocess.Popen(command, stderr=stderr, env={**os.environ, "TMPDIR": str(temporary)})
        processes.append(process)
        while "Serving tiny at unix:" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.02)
        client = httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server", timeout=60)
        return process, client

    yield run
    for process in processes:
        if process.poll() is None:
            process.kill()
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


def shared_memory():
    """Names in /dev/shm that Python, torch or llmkit may have made; browsers of other tests come and go there too."""
    return {
        path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("psm_", "sem.", "torch_", "llmkit"))
    }


def test_sigterm_lets_a_stream_finish_and_leaves_nothing(start, tmp_path):
    """B46."""
    shared_before = shared_memory()
    process, client = start("--log-format", "json")
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    with client, client.stream("POST", "/v1/completions", json=LONG | {"max_tokens": 1000}) as response:
        process.send_signal(signal.SIGTERM)
        assert read_tokens(response) == (1000, "length")
    assert process.wait(15) == 0
    assert not (tmp_path / "s").exists()
    assert list((tmp_path / "tmp").iterdir()) == []
    assert shared_memory() <= shared_before
    log = (tmp_path / "log").read_text()
    assert "resource_tracker" not in log
    access = [json.loads(line) for line in log.splitlines() if "llmkit.server.access" in line]
    assert [(line["path"], line["status"]) for line in access] == [("/v1/completions", 200)]


@pytest.fixture
def compiles(start, tmp_path):
    """A server whose grammars are followed by the hostile engine, with a grammar under way that is never done; the
    process, a future of the response, and all processes below it."""
    folder = tmp_path / "words"
    folder.mkdir()
    words = {word: number for number, word in enumerate([*"!spin", *(f"w{number}" for number in range(123))])}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0")).save(str(folder / "tokenizer.json"))
    with ExitStack() as stack, ThreadPoolExecutor(1) as executor:

        def run(*flags):
            process, client = start(
                "--tokenizer", str(folder), "--structured", "llmkit.testing.hostile_grammars:", *flags
            )
            stack.enter_context(client)
            body = {"prompt": [1, 2, 3], "structured_outputs": {"choice": ["!spin"]}}
            answer = executor.submit(client.post, "/v1/completions", json=body)
            server = psutil.Process(process.pid)
            while not any(child.cpu_times().user > 0.1 and child.nice() >= 15 for child in below(server)):
                assert not answer.done(), answer.result().text
                time.sleep(0.05)
            return process, answer, below(server)

        yield run


def below(process):
    """All its processes that can be looked at."""
    return [child for child in process.children(recursive=True) if child.is_running()]


def is_gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_sigterm_while_a_grammar_is_compiled_without_end(compiles, tmp_path):
    """The drain has a limit, whatever is under way; whoever has no answer then is told so."""
    process, answer, others = compiles("--compile-timeout-s", "3600", "--shutdown-timeout-s", "1")
    assert len(others) >= 3  # the engine, the process that compiles, and its child
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert all(is_gone(other) for other in others)
    assert answer.result().status_code == 503
    assert answer.result().json()["error"]["code"] == 503
    assert answer.result().json()["error"]["message"] == "The server is shutting down."
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_sigterm_lets_a_grammar_come_to_its_end(compiles, tmp_path):
    process, answer, others = compiles("--compile-timeout-s", "3")
    process.send_signal(signal.SIGTERM)
    assert answer.result().status_code == 400
    assert "took longer than 3 s" in answer.result().json()["error"]["message"]
    assert process.wait(20) == 0
    assert all(is_gone(other) for other in others)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_second_signal_ends_at_once(start, tmp_path):
    """B46, with Ctrl-C."""
    shared_before = shared_memory()
    process, client = start()
    with client, client.stream("POST", "/v1/completions", json=LONG | {"n": 16}) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        while True:  # the first signal is being heeded once new connections are refused
            try:
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.connect(str(tmp_path / "s"))
            except OSError:
                break
            time.sleep(0.01)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(15) == 0
    assert not (tmp_path / "s").exists()
    assert list((tmp_path / "tmp").iterdir()) == []
    assert shared_memory() <= shared_before
    assert "resource_tracker" not in (tmp_path / "log").read_text()


@pytest.fixture
def collector():
    """Takes spans over HTTP, as an OpenTelemetry collector does: its endpoint, and the spans so far."""
    spans = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        server.shutdown()


def token_ids(*lines):
    """Of the events of a stream."""
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [token for event in events for token in event["choices"][0]["token_ids"]]


def counters(client):
    lines = client.get("/metrics").text.splitlines()
    samples = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in samples if "_total{" in name or "_count{" in name}


def test_the_engine_dies_in_the_middle_of_answers(start, collector, tmp_path):
    """B44: streams go on, new requests are refused until it runs again, counters never go down, and what is logged and
    traced is whole."""
    endpoint, spans = collector
    process, client = start("--log-format", "json", "--otlp-traces-endpoint", endpoint)
    body = LONG | {"max_tokens": 1000, "temperature": 0}
    with client:
        with client.stream("POST", "/v1/completions", json=body) as response:
            undisturbed = token_ids(*response.iter_lines())
        before = counters(client)
        header = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
        whole = body | {"stream": False}
        with (
            ThreadPoolExecutor(1) as pool,
            client.stream("POST", "/v1/completions", json=body, headers=header) as response,
        ):
            lines = response.iter_lines()
            first = next(lines)
            other = pool.submit(client.post, "/v1/completions", json=whole)
            while client.get("/load").json() != {"server_load": 2}:
                assert not other.done()
            (engine,) = psutil.Process(process.pid).children()
            engine.kill()
            deadline = time.monotonic() + 5
            while client.get("/health").status_code != 503:
                assert time.monotonic() < deadline
            refused = client.post("/v1/completions", json=whole)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, 503)
            assert "retry-after" in refused.headers
            streamed = token_ids(first, *lines)
            answer = other.result().json()["choices"][0]
        assert streamed == undisturbed
        assert answer["token_ids"] == undisturbed
        assert client.get("/health").status_code == 200
        after = counters(client)
    assert all(after[name] >= value for name, value in before.items())
    (restarts,) = [value for name, value in after.items() if name.startswith("llmkit:engine_restarts_total")]
    assert restarts == 1
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    greeting, *lines = (tmp_path / "log").read_text().splitlines()
    assert greeting.startswith("Serving tiny at ")
    log = [json.loads(line) for line in lines]
    assert any("SIGKILL" in line["message"] for line in log)
    ended = [line for line in log if line["logger"] == "llmkit.server.requests"]
    assert len(ended) == len(spans) == 3
    (traced,) = [span for span in spans if span.trace_id == bytes.fromhex("ab" * 16)]
    assert traced.parent_span_id == bytes.fromhex("cd" * 8)
    attributes = {attribute.key: attribute.value for attribute in traced.attributes}
    assert attributes["gen_ai.usage.completion_tokens"].int_value == 1000


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
