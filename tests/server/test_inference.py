"""/inference/v1/generate: token ids in, token ids out."""

from __future__ import annotations

import pytest

PATH = "/inference/v1/generate"
IDS = [104, 105]


def generate(served, params=None, **fields):
    return served.post(PATH, {"token_ids": IDS, "sampling_params": params or {}, **fields})


def answer_ids(served, text):
    return [*served.llm.tokenizer.encode(text), served.llm.tokenizer.eos_token_id]


def test_ids_go_in_and_out(served):
    response = generate(served, {"temperature": 0}, request_id="r1", cache_salt="s", priority=3)
    body = response.json()
    assert body["request_id"] == response.headers["x-request-id"] == "r1"
    (choice,) = body["choices"]
    assert choice["token_ids"] == answer_ids(served, "Hello")
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == 6
    (added,) = served.engine.added
    assert (added.prompt_token_ids, added.cache_salt, added.priority) == (IDS, "s", 3)
    assert added.sampling_params.detokenize is False


def test_without_max_tokens_the_context_is_the_limit(served):
    """Not the 16 tokens that SamplingParams have by themselves: those would cut answers off unasked."""
    generate(served)
    generate(served, {"max_tokens": 3})
    assert [request.max_tokens for request in served.engine.added] == [510, 3]


def test_stop_strings_are_found(served):
    (choice,) = generate(served, {"stop": ["l"]}).json()["choices"]
    assert (choice["stop_reason"], choice["finish_reason"]) == ("l", "stop")
    assert choice["token_ids"] == served.llm.tokenizer.encode("Hel")


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_brings_the_same(served, events, n):
    served.engine.answers = ["Hello", "no"]
    params = {"n": n, "logprobs": 1}
    *chunks, last = events(generate(served, params, stream=True, stream_options={"include_usage": True}))
    whole = generate(served, params).json()
    for index in range(n):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [i for choice in mine for i in choice["token_ids"]] == whole["choices"][index]["token_ids"]
        pieces = [entry for choice in mine for entry in choice["logprobs"]["content"]]
        assert pieces == whole["choices"][index]["logprobs"]["content"]
        assert [choice["finish_reason"] for choice in mine][-1] == "stop"
    assert pieces[0]["token"].startswith("token_id:")
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all("usage" not in chunk or chunk["usage"] is None for chunk in chunks)


def test_fields_that_nothing_reads_are_named(served):
    params = {"output_kind": 2, "detokenize": True, "skip_clone": True, "temperature": None}
    response = generate(served, params, features=None, foo=1)
    assert response.status_code == 200
    assert response.headers["x-llmkit-unknown-fields"] == "features, foo, sampling_params.skip_clone"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": "hi"}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1.5]}, "token_ids"),
        ({"token_ids": [True]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [10**9]}, "token_ids"),
        ({"token_ids": [1] * 600}, "token_ids"),
        ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": [1]}, "sampling_params"),
        ({"sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"sampling_params": {"n": 16000}}, "sampling_params.n"),
        ({"sampling_params": {"stop": 5}}, "sampling_params.stop"),
        ({"sampling_params": {"logprobs": 50}}, "sampling_params.logprobs"),
        ({"sampling_params": {"structured_outputs": 1}}, "sampling_params.structured_outputs"),
        ({"stream": True, "sampling_params": {"prompt_logprobs": 1}}, "sampling_params.prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"kv_transfer_params": 3}, "kv_transfer_params"),
        ({"priority": "high"}, "priority"),
    ],
)
def test_bad_fields_are_named(served, refusal, fields, param):
    refusal(served.post(PATH, {"token_ids": IDS, "sampling_params": {}, **fields}), 400, param)
    assert served.llm.num_unfinished == 0
    assert served.context.admission.num_sequences == 0
