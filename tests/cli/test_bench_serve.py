"""`llmkit bench serve` against a server of the test's own."""

import json

import pytest

from llmkit_cli.main import main

pytestmark = pytest.mark.usefixtures("no_api_key")


@pytest.fixture
def bench(capsys, fake):
    """Runs it with a few short requests: (exit code, stdout, stderr)."""

    def run(*arguments):
        flags = ["--url", fake.url, "--input-len", "4", "--output-len", "3", "--num-prompts", "6", *arguments]
        with pytest.raises(SystemExit) as exit_info:
            main(["bench", "serve", *flags])
        output = capsys.readouterr()
        return exit_info.value.code or 0, output.out, output.err

    return run


def test_the_result_has_the_usual_keys_and_counts(bench, fake):
    code, out, _ = bench("--json", "--goodput", "ttft:60000", "tpot:60000", "--percentiles", "50,90")
    result = json.loads(out)
    assert code == 0
    assert (result["completed"], result["failed"]) == (6, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 24)
    assert result["total_token_throughput"] == pytest.approx(54 / result["duration"])
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for kind in ("mean", "median", "std", "p50", "p90", "p99"):
            assert result[f"{kind}_{metric}_ms"] >= 0
    assert result["mean_ttft_ms"] > 0
    assert (result["request_rate"], result["model"]) == ("inf", "fake")
    assert len(fake.requests) == 7  # one to warm up
    assert len(fake.requests[0]["prompt"]) == 4
    sent = {name: fake.requests[3][name] for name in ("model", "max_tokens", "temperature", "ignore_eos", "stream")}
    assert sent == {"model": "fake", "max_tokens": 3, "temperature": 0, "ignore_eos": True, "stream": True}


def test_chats_and_more_fields(bench, fake):
    code, out, _ = bench("--endpoint", "chat", "--extra-body", '{"top_k": 5}', "--no-ignore-eos", "--json")
    assert code == 0
    assert json.loads(out)["completed"] == 6
    assert set(fake.paths) == {"/v1/chat/completions"}
    assert fake.requests[0]["top_k"] == 5
    assert "ignore_eos" not in fake.requests[0]
    assert len(fake.requests[0]["messages"][0]["content"].split()) == 4


def test_a_table_for_people(bench):
    code, out, _ = bench("--num-warmups", "0")
    assert code == 0
    for word in ("6 completed, 0 failed", "output throughput", "ttft", "e2el", "all at once"):
        assert word in out


def test_without_usage_chunks_are_counted(bench, fake):
    fake.with_usage = False
    _, out, _ = bench("--json")
    assert json.loads(out)["total_output_tokens"] == 18


def test_refusals_are_counted_by_kind_and_the_rest_is_measured(bench, fake):
    fake.statuses = [200, 429, 500, 429]  # the first is the warm-up
    code, out, _ = bench("--json", "--max-concurrency", "1", "--details")
    result = json.loads(out)
    assert code == 0
    assert (result["completed"], result["failed"]) == (3, 3)
    assert {kind: error["count"] for kind, error in result["errors"].items()} == {"429": 2, "500": 1}
    assert "refused with 429" in result["errors"]["429"]["first"]
    assert [error is None for error in result["errors_by_request"]] == [False, False, False, True, True, True]
    assert [len(itls) for itls in result["itls"]] == [0, 0, 0, 2, 2, 2]


def test_a_run_in_which_all_fails_is_a_failure(bench, fake):
    fake.broken = True
    code, out, _ = bench("--num-warmups", "0")
    assert code == 1
    assert "6 × stream" in out
    assert "broke off" in out


def test_an_answer_without_a_token_is_a_failure(bench, fake):
    fake.silent = True
    code, out, _ = bench("--num-warmups", "0")
    assert code == 1
    assert "without a single token" in out


def test_a_first_request_that_fails_is_an_error_and_nothing_is_measured(bench, fake):
    fake.statuses = [400]
    code, out, err = bench()
    assert (code, out) == (1, "")
    assert "refused with 400" in err
    assert len(fake.requests) == 1


def test_a_server_that_does_not_answer_in_time(bench, fake):
    fake.held = True
    code, out, _ = bench("--num-warmups", "0", "--timeout", "0.2")
    assert code == 1
    assert "6 × timeout" in out


def test_the_bound_on_requests_at_once_is_kept(bench, fake):
    _, out, _ = bench("--json", "--max-concurrency", "2")
    assert json.loads(out)["max_concurrent_requests"] == 2
    assert fake.most <= 2


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:1/v1"])
def test_nobody_is_there(bench, url):
    code, _, err = bench("--url", url)
    assert code == 1
    assert "No server answers at http://127.0.0.1:1" in err
    assert "llmkit serve" in err
    assert len(err.strip().splitlines()) == 1


def test_the_key_is_sent_and_missed(bench, fake, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    bench()
    assert set(fake.keys) == {"Bearer sesame"}
    fake.models = None
    code, _, err = bench()
    assert code == 1
    assert "401" in err
    assert "Give a key." in err
    assert "OPENAI_API_KEY" in err
    assert "sesame" not in err


def test_a_model_that_is_not_served(bench):
    code, _, err = bench("--model", "other")
    assert code == 2
    assert "'other'" in err
    assert "fake" in err


def test_a_sweep_has_a_run_for_each_rate_and_new_prompts_in_each(bench, fake, tmp_path):
    file, page = tmp_path / "sweep.json", tmp_path / "sweep.html"
    code, out, _ = bench("--sweep", "300,inf", "--output", str(file), "--plot", str(page))
    assert code == 0
    results = json.loads(file.read_text())["sweep"]
    assert [result["request_rate"] for result in results] == [300, "inf"]
    assert [result["completed"] for result in results] == [6, 6]
    assert "300 requests/s" in out
    assert "<svg" in page.read_text()
    prompts = [tuple(request["prompt"]) for request in fake.requests]
    assert len(prompts) == len(set(prompts)) == 13


def test_arrivals_take_their_time(bench):
    _, out, _ = bench("--request-rate", "50", "--burstiness", "1000", "--json")  # nearly every 20 ms
    assert json.loads(out)["duration"] > 0.09


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--request-rate", "0"], "rate"),
        (["--request-rate", "x"], "rate"),
        (["--sweep", "1,-2"], "rate"),
        (["--plot", "a.html"], "--sweep"),
        (["--sweep", "1", "--plot", "a.pdf"], ".png"),
        (["--goodput", "itl:5"], "goodput"),
        (["tpot:50"], "tpot:50"),
        (["--percentiles", "200"], "percentiles"),
        (["--extra-body", "[]"], "--extra-body"),
        (["--extra-body", "{"], "--extra-body"),
        (["--dataset", "nonsense"], "nonsense"),
        (["--url", "ftp://x"], "ftp://x"),
        (["--url", "http://x:99999"], "99999"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_flags_are_refused_before_anything_is_sent(bench, fake, arguments, word):
    code, _, err = bench(*arguments)
    assert code == 2
    assert word in err
    assert fake.requests == []
