"""The load generator's parts: arrivals, datasets, events, figures, plots."""

import json
import re
import statistics
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from llmkit.errors import ConfigError
from llmkit_cli.load.arrivals import arrival_times
from llmkit_cli.load.curves import rate_name
from llmkit_cli.load.dataset import LoadItem, RandomLengths, body_of, items_of
from llmkit_cli.load.figures import figures, parse_goodput, parse_percentiles
from llmkit_cli.load.plot import write_plot, writer_of
from llmkit_cli.load.plot_page import ticks
from llmkit_cli.load.record import RequestRecord
from llmkit_cli.load.run import LoadRun
from llmkit_cli.remote.chunks import decode_chunk, error_text
from llmkit_cli.remote.events import EventReader

STREAM = (
    b': a comment\n\nevent: x\r\ndata: {"a": 1}\r\n\r\ndata:no space\n\ndata: two\ndata: lines\n\n'
    b"id: 3\n\ndata: \xc3\xa9\n\ndata: [DONE]\n\n"
)
EVENTS = [b'{"a": 1}', b"no space", b"two\nlines", "é".encode(), b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_however_the_bytes_are_cut(size):
    reader = EventReader()
    pieces = [STREAM[i : i + size] for i in range(0, len(STREAM), size)]
    assert [event for piece in pieces for event in reader.feed(piece)] == EVENTS


def test_an_event_that_is_not_complete_is_not_given():
    reader = EventReader()
    assert reader.feed(b"data: half") == []
    assert reader.feed(b"\n") == []
    assert reader.feed(b"\n") == [b"half"]


@pytest.mark.parametrize(
    ("choice", "brings"),
    [
        ({"text": " a", "finish_reason": None}, True),
        ({"text": "", "finish_reason": None}, True),  # half a character
        ({"text": "", "finish_reason": "stop"}, False),
        ({"text": " a", "finish_reason": "length"}, True),
        ({"delta": {"role": "assistant", "content": ""}}, False),
        ({"delta": {"content": "a"}}, True),
        ({"delta": {"reasoning": "a"}}, True),
        ({"delta": {"reasoning_content": "a", "content": None}}, True),
        ({"delta": {"tool_calls": [{"index": 0}]}}, True),
        ({"delta": {"tool_calls": []}}, False),
        ({"delta": {"tool_calls": None}}, False),
        ({"delta": {}, "finish_reason": "stop"}, False),
    ],
)
def test_which_chunks_bring_tokens(choice, brings):
    assert decode_chunk(json.dumps({"choices": [choice]}).encode()).choices[0].brings_tokens is brings


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "no", "code": 400}}', "no"),
        (b'{"error": "no"}', "no"),
        (b'{"detail": "no"}', "no"),
        (b"<html>\n Bad  Gateway", "<html> Bad Gateway"),
        (b"\xff", "\ufffd"),
        (b'["no"]', '["no"]'),
    ],
)
def test_messages_of_errors_in_any_form(body, text):
    assert error_text(body) == text


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_times_between_arrivals_have_the_gammas_mean_and_spread(burstiness):
    times = arrival_times(20_000, 5.0, burstiness, seed=3)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == 0
    assert statistics.mean(gaps) == pytest.approx(1 / 5, rel=0.05)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_arrivals_repeat_with_their_seed_and_an_infinite_rate_is_all_at_once():
    assert arrival_times(9, 2.0, 1.0, 1) == arrival_times(9, 2.0, 1.0, 1) != arrival_times(9, 2.0, 1.0, 2)
    assert arrival_times(3, float("inf"), 1.0, 1) == [0, 0, 0]


def test_random_lengths():
    lengths = RandomLengths(100, 20, ratio=0.5, prefix_len=8, vocabulary=50)
    items = lengths.items(200, "completions", 7)
    assert items == lengths.items(200, "completions", 7) != lengths.items(200, "completions", 8)
    assert {tuple(item.prompt[:8]) for item in items} == {tuple(items[0].prompt[:8])}
    sizes = [len(item.prompt) - 8 for item in items]
    assert (min(sizes) >= 50, max(sizes) <= 150, min(sizes) < 60, max(sizes) > 140) == (True,) * 4
    assert {10 <= item.max_tokens <= 30 for item in items} == {True}
    assert {10 <= token < 50 for item in items for token in item.prompt} == {True}


def test_random_chats_are_words():
    (item,) = RandomLengths(12, 5, prefix_len=3).items(1, "chat", 0)
    assert len(item.prompt[0]["content"].split()) == 15
    assert body_of(item, "chat", "m", {"temperature": 0}) == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": item.prompt,
        "max_tokens": 5,
        "temperature": 0,
    }


def test_a_workload_begins_again_when_more_is_asked_for():
    items = items_of("batch-2", "completions", 5, RandomLengths(), 0)
    assert [item.max_tokens for item in items] == [128] * 5
    assert items[0] == items[2] == items[4] != items[1]


def test_a_file_has_prompts_or_messages_and_fields_of_the_body(tmp_path):
    file = tmp_path / "load.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    rows = [{"prompt": "a", "max_tokens": 3, "top_p": 0.5}, {"prompt": [1, 2]}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    items = items_of(str(file), "completions", None, RandomLengths(), 0)
    assert items == [LoadItem("a", 3, {"top_p": 0.5}), LoadItem([1, 2], None)]
    assert body_of(items[0], "completions", "m", {"top_p": 1})["top_p"] == 0.5
    assert "max_tokens" not in body_of(items[1], "completions", "m", {})
    file.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"prompt": "hi"}))
    assert items_of(str(file), "chat", None, RandomLengths(), 0) == [LoadItem(messages, None)] * 2


@pytest.mark.parametrize(
    ("line", "endpoint", "word"),
    [
        ("{", "completions", "not JSON"),
        ("[1]", "completions", "not a JSON object"),
        ("{}", "completions", "either prompt or messages"),
        ('{"prompt": "a", "messages": []}', "chat", "either prompt or messages"),
        ('{"prompt": "a", "max_tokens": 0}', "completions", "max_tokens"),
        ('{"prompt": "a", "max_tokens": "3"}', "completions", "max_tokens"),
        ('{"messages": []}', "completions", "--endpoint chat"),
        ('{"prompt": [1]}', "chat", "token ids"),
        ("", "completions", "empty"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path, line, endpoint, word):
    file = tmp_path / "load.jsonl"
    file.write_text(line)
    with pytest.raises(ConfigError, match=re.escape(word)) as error:
        items_of(str(file), endpoint, None, RandomLengths(), 0)
    assert "load.jsonl" in str(error.value)


@pytest.mark.parametrize(
    ("dataset", "endpoint", "word"),
    [("nonsense", "completions", "decode-128"), ("decode-128", "chat", "token ids"), ("no/file.jsonl", "chat", "read")],
)
def test_datasets_that_there_are_not(dataset, endpoint, word):
    with pytest.raises(ConfigError, match=word):
        items_of(dataset, endpoint, None, RandomLengths(), 0)


RECORDS = [
    RequestRecord(0.0, ttft=0.1, itls=[0.1, 0.2], e2el=0.4, prompt_tokens=10, output_tokens=3, num_chunks=3),
    RequestRecord(1.0, ttft=0.3, itls=[], e2el=0.3, prompt_tokens=20, output_tokens=1, num_chunks=1),
    RequestRecord(1.0, error_kind="429", error="busy", ttft=9.0),
    RequestRecord(1.0, error_kind="429", error="busy, too"),
]
KEYS = {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
        "output_throughput", "total_token_throughput"}  # fmt: skip
TIMES = {
    f"{kind}_{metric}_ms" for kind in ("mean", "median", "std", "p99") for metric in ("ttft", "tpot", "itl", "e2el")
}


def test_figures_have_the_usual_names_and_leave_failures_out_of_times():
    result = figures(LoadRun(RECORDS, 2.0, 0.1, 4))
    assert set(result) == KEYS | TIMES | {"max_concurrent_requests", "client_load", "errors"}
    assert (result["completed"], result["failed"]) == (2, 2)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 4)
    assert (result["request_throughput"], result["output_throughput"]) == (1, 2)
    assert result["total_token_throughput"] == 17
    assert result["mean_ttft_ms"] == pytest.approx(200)
    assert result["std_ttft_ms"] == pytest.approx(100)
    assert result["p99_ttft_ms"] == pytest.approx(298)
    assert result["mean_tpot_ms"] == pytest.approx(150)  # of the one with more than one token
    assert result["median_itl_ms"] == pytest.approx(150)
    assert result["mean_e2el_ms"] == pytest.approx(350)
    assert result["errors"] == {"429": {"count": 2, "first": "busy"}}
    json.dumps(result, allow_nan=False)


def test_nothing_but_failures_gives_figures_too():
    result = figures(LoadRun(RECORDS[2:], 2.0, 0.1, 2), goals={"ttft": 1.0})
    assert (result["completed"], result["mean_ttft_ms"], result["request_goodput"]) == (0, 0, 0)


def test_goodput_counts_the_requests_that_meet_every_goal():
    run = LoadRun(RECORDS, 2.0, 0.1, 4)
    goods = [figures(run, goals=goals)["request_goodput"] for goals in ({"ttft": 300.1}, {"ttft": 300.1, "e2el": 350})]
    assert goods == [1.0, 0.5]
    assert figures(run, goals={"tpot": 149})["request_goodput"] == 0.5  # a single token has no tpot to miss


def test_percentiles_are_added():
    result = figures(LoadRun(RECORDS, 2.0, 0.1, 4), [50, 99.9])
    assert result["p50_ttft_ms"] == result["median_ttft_ms"]
    assert "p99.9_itl_ms" in result
    assert set(result) >= TIMES


def test_goals_in_any_of_the_usual_spellings():
    assert parse_goodput(["ttft:500 tpot:50", "e2el:1.5"]) == {"ttft": 500, "tpot": 50, "e2el": 1.5}
    assert parse_goodput(["ttft:500,tpot:50"]) == {"ttft": 500, "tpot": 50}


@pytest.mark.parametrize("word", ["itl:5", "ttft", "ttft:x", "ttft:-1", "ttft:0", "ttft:nan"])
def test_bad_goals(word):
    with pytest.raises(ConfigError, match="goodput"):
        parse_goodput([word])


@pytest.mark.parametrize("text", ["", "x", "101", "-1", "nan"])
def test_bad_percentiles(text):
    with pytest.raises(ConfigError, match="percentiles"):
        parse_percentiles(text)


@pytest.mark.parametrize("greatest", [0.0, 1e-6, 0.7, 1.0, 6.0, 6.1, 99.0, 1234.0, 7e9])
def test_ticks_are_round_and_reach_beyond_the_greatest_value(greatest):
    found = ticks(greatest)
    assert found[0] == 0
    assert found[-1] >= greatest
    assert 2 <= len(found) <= 8
    assert len(found) == 2 or found[-2] < greatest


def results(*rates):
    rows = []
    for i, rate in enumerate(rates, 1):
        times = dict.fromkeys(TIMES, 10.0 * i)
        rows.append({"request_rate": rate, "model": "m", "dataset": "<d>", **dict.fromkeys(KEYS, 5.0 * i), **times})
    return rows


def test_the_page_needs_no_other_host_and_shows_every_rate(tmp_path):
    file = tmp_path / "plot.html"
    write_plot(file, "a <title>", results(1.0, 2.5, "inf"))
    text = file.read_text()
    assert not re.search(r"(src|href|@import|url\()", text)
    assert text.count("<svg") == 3
    assert text.count("<circle") == 3 * 2 * 3
    assert "a &lt;title&gt;" in text
    assert "<d>" not in text
    for rate in ("1/s", "2.5/s", "all at once"):
        assert f"<th>{rate}</th>" in text


def test_the_same_as_png(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plot.png"
    write_plot(file, "title", results(1.0, "inf"))
    assert file.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_says_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'matplotlib>="):
        writer_of(Path("plot.png"))
    assert writer_of(Path("plot.html"))
    with pytest.raises(ConfigError, match=r"\.png or an \.html"):
        writer_of(Path("plot.pdf"))


def test_rates_have_names():
    assert [rate_name({"request_rate": rate}) for rate in (2.0, 0.25, "inf")] == ["2/s", "0.25/s", "all at once"]
