"""Batch files: lines, the journal, resuming, and the whole command with the real model."""

import asyncio
import json
import os

import pytest

from llmkit.errors import ConfigError, EngineDeadError
from llmkit_cli.batch import run as batch_run
from llmkit_cli.batch.journal import Journal
from llmkit_cli.batch.run import BatchRun
from llmkit_cli.main import main


class FakeResponder:
    """Answers with the prompt; `statuses` says what happens to a prompt the first times it comes."""

    def __init__(self, statuses=None):
        self.paths = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/files"})
        self.statuses = statuses or {}
        self.sent = []
        self.most = self.open = 0

    async def post(self, path, body):
        assert path == "/v1/completions"
        prompt = json.loads(body)["prompt"]
        self.sent.append(prompt)
        self.open += 1
        self.most = max(self.most, self.open)
        for _ in range(sum(map(ord, prompt)) % 3):  # they end in another order than they begin
            await asyncio.sleep(0)
        self.open -= 1
        status = self.statuses.get(prompt, [200])
        status = status.pop(0) if status else 200
        if isinstance(status, Exception):
            raise status
        return status, {"x-request-id": f"id-{prompt}"}, json.dumps({"text": prompt}).encode()


def line(name, **changes):
    value = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": name}, **changes}
    return json.dumps({key: item for key, item in value.items() if item is not None})


@pytest.fixture
def batch(tmp_path):
    """Runs lines through a responder into `out.jsonl`: (results, summary)."""
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def run(lines, responder, **arguments):
        file.write_bytes(b"\n".join(item if isinstance(item, bytes) else item.encode() for item in lines))
        with Journal(output) as journal:
            batch_of = BatchRun(responder, journal, **{"concurrency": 4, **arguments})
            journal.publish(asyncio.run(batch_of.run(file)))
        return [json.loads(row) for row in output.read_text().splitlines()], batch_of.summary

    run.output = output
    run.part = tmp_path / "out.jsonl.part"
    return run


def test_results_come_in_the_order_of_the_lines_in_openais_form(batch):
    names = [f"n{i}" for i in range(40)]
    responder = FakeResponder()
    results, summary = batch(map(line, names), responder)
    assert [result["custom_id"] for result in results] == names
    assert results[3]["response"] == {"status_code": 200, "request_id": "id-n3", "body": {"text": "n3"}}
    assert results[3]["error"] is None
    assert len({result["id"] for result in results}) == 40
    assert all(result["id"].startswith("batch_req_") for result in results)
    assert (summary.completed, summary.failed, summary.resumed) == (40, 0, 0)
    assert responder.most == 4
    assert [path.name for path in sorted(batch.output.parent.iterdir())] == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize(
    ("bad", "custom_id", "word"),
    [
        (b"{", None, "not JSON"),
        (b"\xff", None, "not JSON"),
        (b"[" * 100_000, None, "not JSON"),
        (b"[1]", None, "not a JSON object"),
        (line("x", custom_id=None), None, "custom_id"),
        (line("x", custom_id=7), None, "custom_id"),
        (line("x", custom_id=""), None, "custom_id"),
        (line("x", method="GET"), "x", "method"),
        (line("x", url="/v1/files"), "x", "/v1/chat/completions, /v1/completions"),
        (line("x", url=None), "x", "url"),
        (line("x", url=["a"]), "x", "url"),
        (line("x", body=None), "x", "body"),
        (line("x", body=[]), "x", "body"),
        (line("x", body={"prompt": "x", "stream": True}), "x", "stream"),
        (line("a"), "a", "earlier line"),
    ],
    ids=str,
)
def test_a_bad_line_gets_an_error_and_nothing_else_is_lost(batch, bad, custom_id, word):
    results, summary = batch([line("a"), bad, "", line("b")], FakeResponder())
    assert [result["custom_id"] for result in results] == ["a", custom_id, "b"]
    assert results[1]["response"] is None
    assert word in results[1]["error"]["message"]
    assert results[1]["error"]["code"] in ("invalid_json", "invalid_request")
    assert [results[i]["response"]["status_code"] for i in (0, 2)] == [200, 200]
    assert (summary.completed, summary.failed) == (2, 1)


def test_a_refusal_is_a_result(batch):
    results, summary = batch([line("a"), line("b")], FakeResponder({"a": [400]}))
    assert results[0]["response"] == {"status_code": 400, "request_id": "id-a", "body": {"text": "a"}}
    assert (summary.completed, summary.failed) == (1, 1)


def test_a_full_or_restarting_server_is_asked_again(batch, monkeypatch):
    monkeypatch.setattr(batch_run, "RETRY_S", 0)
    responder = FakeResponder({"a": [429, 503]})
    results, _ = batch([line("a")], responder)
    assert results[0]["response"]["status_code"] == 200
    assert responder.sent == ["a"] * 3


def test_a_run_that_breaks_off_goes_on_where_it_was(batch):
    lines = [line("a"), b"{", line("b"), line("c"), line("d")]
    with pytest.raises(EngineDeadError):
        batch(lines, FakeResponder({"c": [503]}), concurrency=1, is_alive=lambda: False)
    assert not batch.output.exists()
    assert len(batch.part.read_bytes().splitlines()) == 3
    with batch.part.open("ab") as part:
        part.write(b'{"line": 4, "digest": "cut o')  # as a process leaves it that is killed while it writes
    responder = FakeResponder()
    results, summary = batch(lines, responder)
    assert responder.sent == ["c", "d"]
    assert [result["custom_id"] for result in results] == ["a", None, "b", "c", "d"]
    assert (summary.completed, summary.resumed, summary.failed) == (2, 2, 1)
    assert not batch.part.exists()


def test_what_changed_or_failed_is_asked_again(batch):
    lines = [line("a"), line("b"), line("c")]
    with pytest.raises(ZeroDivisionError):
        batch(lines, FakeResponder({"b": [500], "c": [ZeroDivisionError()]}), concurrency=1)
    responder = FakeResponder()
    results, _ = batch([line("a", body={"prompt": "new"}), *lines[1:]], responder)
    assert responder.sent == ["new", "b", "c"]
    assert [result["response"]["body"]["text"] for result in results] == ["new", "b", "c"]


def test_two_at_once_on_one_output_are_refused(batch):
    with Journal(batch.output), pytest.raises(ConfigError, match="Another process"), Journal(batch.output):
        pass
    assert not batch.part.exists()


def test_an_output_that_cannot_be_written_leaves_the_journal(batch, monkeypatch):
    def fail(*_):
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(ConfigError, match="No space left"):
            batch([line("a")], FakeResponder())
    responder = FakeResponder()
    assert batch([line("a")], responder)[1].resumed == 1
    assert responder.sent == []


@pytest.fixture
def llmkit(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as exit_info:
            main(["run-batch", *map(str, arguments)])
        output = capsys.readouterr()
        return exit_info.value.code or 0, output.err

    return run


def test_files_are_checked_before_anything_is_loaded(llmkit, tmp_path):
    there = tmp_path / "there.jsonl"
    there.write_text(line("a"))
    code, err = llmkit("-i", tmp_path / "missing.jsonl", "-o", tmp_path / "out.jsonl", "--model", "/nowhere")
    assert code == 2
    assert "missing.jsonl" in err
    code, err = llmkit("-i", there, "-o", there, "--model", "/nowhere")
    assert code == 2
    assert "--overwrite" in err
    code, err = llmkit("-i", there, "-o", tmp_path / "no" / "out.jsonl", "--model", "/nowhere")
    assert code == 2
    assert "cannot be written" in err
    code, err = llmkit("-i", there, "-o", tmp_path / "out.jsonl", "--model", "/nowhere/model")
    assert code == 1
    assert "/nowhere/model" in err
    assert [path.name for path in tmp_path.iterdir()] == ["there.jsonl"]


@pytest.mark.model
def test_a_batch_with_the_real_model(llmkit, tmp_path, smollm2_gguf, monkeypatch):
    monkeypatch.setenv("LLMKIT_NUM_THREADS", "1")
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    greedy = {"max_tokens": 4, "temperature": 0}
    messages = [{"role": "user", "content": "What is 2+2? Answer with one number."}]
    file.write_text(
        "\n".join(
            [
                line("text", body={"prompt": "The capital of France is", **greedy}),
                line("bad", body={"prompt": "x", "temperature": 9}),
                line("chat", url="/v1/chat/completions", body={"messages": messages, "model": "smol", **greedy}),
            ]
        )
    )
    flags = ("--model", smollm2_gguf, "--dtype", "float32", "--num-blocks", "64", "--served-model-name", "smol")
    code, err = llmkit("-i", file, "-o", output, *flags)
    assert code == 0, err
    assert "2 answered, 1 with errors" in err
    text, bad, chat = (json.loads(row)["response"] for row in output.read_text().splitlines())
    assert text["body"]["choices"][0]["text"].startswith(" Paris.")
    assert bad["status_code"] == 400
    assert bad["body"]["error"]["param"] == "temperature"
    assert chat["body"]["choices"][0]["message"]["content"] == "The answer is "
