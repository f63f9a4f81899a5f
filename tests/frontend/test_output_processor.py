"""Engine outputs to request outputs, and the loop that serves several callers."""

from __future__ import annotations

import threading

import pytest

from llmkit.errors import EngineClosedError, EngineError
from llmkit.frontend.output_processor import OutputProcessor
from llmkit.frontend.prompts import RequestOptions
from llmkit.frontend.request_loop import RequestLoop
from llmkit.requests.logprobs import PositionLogprobs
from llmkit.requests.message import EngineOutput
from llmkit.requests.sampling_params import OutputKind, SamplingParams


def news(text="", *, index=0, ids=None, **kwargs):
    """An output whose tokens are the bytes of `text`; the scripted client fills in the request."""
    token_ids = list(text.encode()) if ids is None else ids
    return EngineOutput(request_id="", index=index, new_token_ids=token_ids, **kwargs)


@pytest.fixture
def setting(make_processor, byte_tokenizer, scripted_client):
    """(make a request loop playing steps, prepare a request)"""
    processor = make_processor(byte_tokenizer)

    def loop(*steps):
        client = scripted_client(steps)
        return client, RequestLoop(client, OutputProcessor(byte_tokenizer))

    def prepare(kind=OutputKind.FINAL_ONLY, prompt="p", **params):
        params.setdefault("max_tokens", 30)
        return processor.prepare(prompt, SamplingParams(output_kind=kind, **params), RequestOptions(request_id="mine"))

    return loop, prepare


def run(loop, prepared):
    return loop.run(prepared, lambda _: None)


def test_final_outputs_in_the_order_of_the_requests(setting):
    make, prepare = setting
    _, loop = make(
        [(0, news("a")), (1, news("x"))],
        [(1, news("y", finish_reason="length"))],
        [(0, news(ids=[257], finish_reason="stop"))],
    )
    first, second = run(loop, [prepare(), prepare()])
    assert (first.request_id, first.prompt, first.prompt_token_ids, first.finished) == ("mine", "p", [112], True)
    answer = first.outputs[0]
    assert (answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason) == ("a", [97, 257], "stop", None)
    assert (second.outputs[0].text, second.outputs[0].finish_reason) == ("xy", "length")
    assert first.metrics.arrival_time <= first.metrics.first_token_time <= first.metrics.finished_time


def test_a_stop_string_cuts_ids_and_logprobs_and_ends_the_sequence_in_the_engine(setting):
    """B74's shape: several tokens in one step, the stop string in the middle."""
    make, prepare = setting
    logprobs = [PositionLogprobs([b, 7], [-0.5, -1.0], [1, 2]) for b in b"hello!"]
    client, loop = make([(0, news("hello!", logprobs=logprobs))])
    output = run(loop, [prepare(stop="ll", logprobs=1)])[0]
    answer = output.outputs[0]
    assert (answer.text, answer.token_ids, answer.stop_reason) == ("he", list(b"hell"), "ll")
    assert len(answer.logprobs) == 4
    assert answer.cumulative_logprob == -2.0
    assert answer.logprobs[0].decoded_tokens == ["h", "\x07"]
    assert client.aborted_sequences == [(client.added[0].request_id, 0)]
    assert len(loop._outputs) == 0


def test_a_stop_string_at_the_very_end_needs_no_abort(setting):
    make, prepare = setting
    client, loop = make([(0, news("ab", finish_reason="length"))])
    assert run(loop, [prepare(stop="b")])[0].outputs[0].finish_reason == "stop"
    assert client.aborted_sequences == []


def test_held_text_is_flushed_when_the_answer_ends(setting):
    make, prepare = setting
    _, loop = make([(0, news("xa"))], [(0, news("b", finish_reason="length"))])
    assert run(loop, [prepare(stop="abc")])[0].outputs[0].text == "xab"


def test_the_stop_token_is_counted_but_not_shown(setting):
    make, prepare = setting
    stop = news("a!", finish_reason="stop", stop_reason=33)
    _, loop = make([(0, stop)])
    answer = run(loop, [prepare(stop_token_ids=[33])])[0].outputs[0]
    assert (answer.text, answer.token_ids, answer.stop_reason) == ("a", [97, 33], 33)
    _, loop = make([(0, news("a!", finish_reason="stop", stop_reason=33))])
    answer = run(loop, [prepare(stop_token_ids=[33], include_stop_str_in_output=True)])[0].outputs[0]
    assert answer.text == "a!"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_streams_join_up_to_the_whole(setting, cut):
    """B02: the same text streamed and not, also when the last character stays unfinished."""
    make, prepare = setting
    data = list("a🌶b🌶".encode())[: -cut + 1 or None]
    steps = [[(0, news(ids=[b]))] for b in data[:-1]] + [[(0, news(ids=data[-1:], finish_reason="length"))]]
    _, loop = make(*steps)
    deltas = list(loop.stream(prepare(OutputKind.DELTA)))
    whole = run(make(*steps)[1], [prepare()])[0].outputs[0]
    assert "".join(delta.outputs[0].text for delta in deltas) == whole.text
    assert [i for delta in deltas for i in delta.outputs[0].token_ids] == data == whole.token_ids
    assert whole.text == ("a🌶b🌶" if cut == 1 else "a🌶b")
    assert [delta.finished for delta in deltas] == [False] * (len(data) - 1) + [True]


def test_cumulative_outputs(setting):
    make, prepare = setting
    _, loop = make([(0, news("a"))], [(0, news("b"))], [(0, news("c", finish_reason="length"))])
    outputs = list(loop.stream(prepare(OutputKind.CUMULATIVE)))
    assert [output.outputs[0].text for output in outputs] == ["a", "ab", "abc"]
    assert [output.outputs[0].token_ids for output in outputs] == [[97], [97, 98], [97, 98, 99]]


def test_several_answers_end_one_by_one(setting):
    make, prepare = setting
    _, loop = make(
        [(0, news("a")), (0, news("x", index=1))],
        [(0, news("b", index=0, finish_reason="length")), (0, news("!", index=1))],
        [(0, news("z", index=1, finish_reason="length"))],
    )
    deltas = list(loop.stream(prepare(OutputKind.DELTA, n=2)))
    assert [[(c.index, c.text, c.finish_reason) for c in d.outputs] for d in deltas] == [
        [(0, "a", None), (1, "x", None)],
        [(0, "b", "length"), (1, "!", None)],
        [(1, "z", "length")],
    ]
    assert [delta.finished for delta in deltas] == [False, False, True]


def test_prompt_logprobs_in_chunks_and_scoring(setting):
    make, prepare = setting
    entry = PositionLogprobs([112], [-1.0], [1])
    _, loop = make(
        [(0, news(prompt_logprobs=[None, entry]))],
        [(0, news(prompt_logprobs=[entry], finish_reason="length", num_cached_tokens=1))],
    )
    outputs = list(loop.stream(prepare(OutputKind.DELTA, prompt="ppp", max_tokens=0, prompt_logprobs=1)))
    assert len(outputs) == 1
    assert [e and e.decoded_tokens for e in outputs[0].prompt_logprobs] == [None, ["p"], ["p"]]
    assert outputs[0].num_cached_tokens == 1
    assert outputs[0].outputs[0].token_ids == []


def test_an_error_is_an_output(setting):
    make, prepare = setting
    _, loop = make([(0, news(finish_reason="error", error="too long")), (1, news("a", finish_reason="length"))])
    bad, good = run(loop, [prepare(), prepare()])
    assert (bad.error, bad.outputs[0].finish_reason) == ("too long", "error")
    assert good.outputs[0].text == "a"


def test_without_detokenization(setting):
    make, prepare = setting
    _, loop = make([(0, news("ab", finish_reason="length"))])
    answer = run(loop, [prepare(detokenize=False)])[0].outputs[0]
    assert (answer.text, answer.token_ids) == ("", [97, 98])


def test_closing_a_stream_aborts_its_request_and_late_tokens_are_ignored(setting):
    make, prepare = setting
    client, loop = make([(0, news("a"))], [(0, news("b")), (1, news("x", finish_reason="length"))])
    stream = loop.stream(prepare(OutputKind.DELTA))
    next(stream)
    stream.close()
    assert client.aborted == [client.added[0].request_id]
    assert run(loop, [prepare()])[0].outputs[0].text == "x"
    assert len(loop._outputs) == 0


def test_a_finished_stream_is_not_aborted(setting):
    make, prepare = setting
    client, loop = make([(0, news("a", finish_reason="length"))])
    assert len(list(loop.stream(prepare(OutputKind.DELTA)))) == 1
    assert client.aborted == []


def test_two_open_streams_do_not_mix(setting):
    make, prepare = setting
    _, loop = make(
        [(0, news("a"))],
        [(0, news("b")), (1, news("x"))],
        [(0, news("c", finish_reason="length")), (1, news("y", finish_reason="length"))],
    )
    first = loop.stream(prepare(OutputKind.DELTA))
    assert next(first).outputs[0].text == "a"
    second = loop.stream(prepare(OutputKind.DELTA))
    assert [output.outputs[0].text for output in second] == ["x", "y"]
    assert [output.outputs[0].text for output in first] == ["b", "c"]


def test_threads_share_a_loop(setting):
    make, prepare = setting
    count = 8
    steps = [[(i, news("a")) for i in range(count)] for _ in range(20)]
    steps.append([(i, news("b", finish_reason="length")) for i in range(count)])
    client, loop = make(*steps)
    ready = threading.Barrier(count)
    add = client.add

    def add_all_first(requests):
        add(requests)
        if len(client.added) == count:
            everyone.set()

    everyone = threading.Event()
    client.add = add_all_first
    step = client.outputs
    client.outputs = lambda: step() if everyone.is_set() else []
    results = [None] * count

    def work(i):
        ready.wait()
        results[i] = run(loop, [prepare()])[0].outputs[0].text

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["a" * 20 + "b"] * count


def test_an_interrupted_run_aborts_what_is_left(setting):
    make, prepare = setting
    client, loop = make([(0, news("a", finish_reason="length")), (1, news("x"))])

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.run([prepare(), prepare()], interrupt)
    assert client.aborted == [client.added[1].request_id]


@pytest.mark.parametrize("where", ["outputs", "abort_sequences"])
def test_an_interrupted_step_ends_everybody(setting, where):
    """Tokens of the step may be lost, so an open stream must not go on as if nothing had happened."""
    make, prepare = setting
    client, loop = make(
        [(0, news("a"))], [(0, news("b")), (1, news("x")), (1, news("end"))], [(0, news("c", finish_reason="length"))]
    )
    stream = loop.stream(prepare(OutputKind.DELTA))
    assert next(stream).outputs[0].text == "a"
    step = getattr(client, where)

    def interrupted(*arguments):
        step(*arguments)
        raise KeyboardInterrupt

    setattr(client, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(loop, [prepare(stop=["end"])])
    last = list(stream)[-1]
    assert (last.finished, last.outputs[0].finish_reason) == (True, "error")
    assert "KeyboardInterrupt" in last.error
    assert set(client.aborted) == {request.request_id for request in client.added}
    assert len(loop._outputs) == 0


def test_a_stream_that_is_closed_from_within_a_step_is_aborted_after_it(setting):
    """The collector closes a forgotten stream at any moment, also while the scheduler changes its books."""
    make, prepare = setting
    client, loop = make([(0, news("a"))], [(1, news("x"))], [(1, news("y", finish_reason="length"))])
    forgotten = loop.stream(prepare(OutputKind.DELTA))
    next(forgotten)
    step, during = client.outputs, []

    def outputs():
        forgotten.close()
        during.append(list(client.aborted))
        with pytest.raises(EngineError, match="middle of a step"):
            run(loop, [prepare()])
        return step()

    client.outputs = outputs
    assert run(loop, [prepare()])[0].outputs[0].text == "xy"
    assert during[0] == []
    assert client.aborted == [client.added[0].request_id]


def test_a_lost_request_is_an_error_not_an_endless_loop(setting):
    make, prepare = setting
    client, loop = make([])
    with pytest.raises(EngineError, match="nothing to do"):
        run(loop, [prepare()])
    assert len(client.aborted) == 1


def test_closed(setting):
    make, prepare = setting
    client, loop = make([(0, news("a"))], [(0, news("b"))])
    stream = loop.stream(prepare(OutputKind.DELTA))
    next(stream)
    loop.close()
    loop.close()
    assert client.closed == 1
    with pytest.raises(EngineClosedError):
        next(stream)
    with pytest.raises(EngineClosedError):
        run(loop, [prepare()])
