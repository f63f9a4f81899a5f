"""`llmkit complete` and `llmkit chat` with --url."""

import io

import pytest

from llmkit_cli.main import main

pytestmark = pytest.mark.usefixtures("no_api_key")

ANSWER = " one two three"


@pytest.fixture
def llmkit(capsys, fake, monkeypatch):
    """Runs a command on the server with lines of input: (exit code, stdout, stderr)."""

    def run(command, *arguments, lines=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        with pytest.raises(SystemExit) as exit_info:
            main([command, "--url", fake.url, *arguments])
        output = capsys.readouterr()
        return exit_info.value.code or 0, output.out, output.err

    return run


def test_complete_prints_the_continuation(llmkit, fake):
    flags = ("--temperature", "0", "--top-k", "5", "--sampling-seed", "3", "--stop", "x")
    assert llmkit("complete", *flags, "Count:") == (0, f"{ANSWER}\n", "")
    fields = {"max_tokens": 256, "temperature": 0, "top_k": 5, "seed": 3, "stop": ["x"]}
    assert fake.requests == [{"model": "fake", "stream": True, "prompt": "Count:", **fields}]


def test_complete_takes_lines(llmkit, fake):
    fake.statuses = [200, 400]
    code, out, err = llmkit("complete", lines="a\n\nb\nc\n")
    assert (code, out) == (1, f"{ANSWER}\n\n{ANSWER}\n")
    assert "refused with 400" in err
    assert [request["prompt"] for request in fake.requests] == ["a", "b", "c"]


def test_chat_holds_a_conversation_and_takes_back_a_refused_turn(llmkit, fake):
    fake.statuses = [200, 429]
    code, out, err = llmkit("chat", "--system", "Be brief.", lines="a\nb\nc\n/reset\nd\n/exit\ne\n")
    assert code == 1  # an answer failed, and nobody saw it
    assert out == f"{ANSWER}\n\n{ANSWER}\n{ANSWER}\n"
    assert "429" in err
    said = [[message["content"] for message in request["messages"]] for request in fake.requests]
    assert said == [
        ["Be brief.", "a"],
        ["Be brief.", "a", ANSWER, "b"],
        ["Be brief.", "a", ANSWER, "c"],
        ["Be brief.", "d"],
    ]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("command", ["chat", "complete"])
def test_a_line_that_is_no_text_fails_alone(capsys, fake, monkeypatch, command, errors):
    lines = io.BytesIO(b"\377\376bad\nWhy\xc3\xa9?\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(lines, encoding="utf-8", errors=errors))
    with pytest.raises(SystemExit) as exit_info:
        main([command, "--url", fake.url])
    output = capsys.readouterr()
    assert exit_info.value.code == 1
    assert output.err == "llmkit: A line of the input is not UTF-8 text.\n"
    assert output.out.strip("\n") == ANSWER
    (request,) = fake.requests
    assert "Whyé?" in (request.get("prompt"), *(message["content"] for message in request.get("messages", ())))


def test_the_key_and_the_model(llmkit, fake):
    fake.models = ["one", "two"]
    llmkit("complete", "--api-key", "sesame", "--model", "two", "x")
    assert fake.keys == ["Bearer sesame"]
    assert fake.requests[0]["model"] == "two"
    code, _, err = llmkit("complete", "--model", "three", "x")
    assert code == 2
    assert "one, two" in err


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_flags_of_an_engine_are_refused(llmkit, fake, command):
    code, _, err = llmkit(command, "--max-num-seqs", "4", "--set", "seed=1")
    assert code == 2
    assert "scheduler.max_num_seqs" in err
    assert "settings" in err
    assert fake.requests == []


def test_an_answer_that_breaks_off_is_an_error(llmkit, fake):
    fake.broken = True
    code, out, err = llmkit("complete", "x")
    assert (code, out) == (1, f"{ANSWER}\n")
    assert "broke off" in err
