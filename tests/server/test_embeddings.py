"""/v1/embeddings and /pooling, and what is there only to say that it is not supported."""

from __future__ import annotations

import asyncio
import base64
import struct

import pytest

EMBEDDINGS = "/v1/embeddings"


def vectors(response):
    assert response.status_code == 200, response.text
    body = response.json()
    assert [item["index"] for item in body["data"]] == list(range(len(body["data"])))
    return [item.get("embedding", item.get("data")) for item in body["data"]], body["usage"]


@pytest.mark.parametrize(
    ("given", "lengths"),
    [("hi", [2]), ([72, 105, 33], [3]), (["hi", "xyz"], [2, 3]), ([[72], [73, 74]], [1, 2])],
)
def test_every_form_of_input(served, given, lengths):
    found, usage = vectors(served.post(EMBEDDINGS, {"input": given, "normalize": False}))
    assert found == [[3.0, 4.0, float(length), 0.0] for length in lengths]
    assert usage["prompt_tokens"] == usage["total_tokens"] == sum(lengths)
    assert served.context.admission.num_sequences == 0


def test_vectors_have_length_one_unless_told_otherwise(served):
    (found,), _ = vectors(served.post(EMBEDDINGS, {"input": "hi", "dimensions": 2}))
    assert found == [0.6, 0.8]


def test_base64_is_32_bit_floats(served):
    (text,), _ = vectors(served.post(EMBEDDINGS, {"input": "hi", "dimensions": 2, "encoding_format": "base64"}))
    assert struct.unpack("<2f", base64.b64decode(text)) == pytest.approx((0.6, 0.8))


def test_pooling_is_the_same_in_another_shape(served):
    response = served.post("/pooling", {"input": "hi", "task": "embed", "pooling": "mean", "dimensions": 2})
    assert vectors(response)[0] == [[0.6, 0.8]]
    assert response.json()["data"][0]["object"] == "pooling"
    assert served.engine.added[0].pooling == "mean"


def test_a_batch_may_be_larger_than_the_queue(serve):
    served = serve(max_queue=2)
    texts = ["x" * (1 + i % 7) for i in range(100)]
    found, _ = vectors(served.post(EMBEDDINGS, {"input": texts, "normalize": False}))
    assert [int(vector[2]) for vector in found] == [len(text) for text in texts]
    assert served.context.admission.num_sequences == 0


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"input": None}, "input", 400),
        ({"input": ""}, "input", 400),
        ({"input": []}, "input", 400),
        ({"input": ["hi", ""]}, "input", 400),
        ({"input": ["hi", 3]}, "input", 400),
        ({"input": [[1], [10**6]]}, "input", 400),
        ({"input": ["a"] * 3000}, "input", 400),
        ({"input": [1] * 600}, "input", 400),
        ({"input": {"a": 1}}, "input", 400),
        ({"dimensions": 0}, "dimensions", 400),
        ({"dimensions": 5}, "dimensions", 400),
        ({"dimensions": "many"}, "dimensions", 400),
        ({"encoding_format": "hex"}, "encoding_format", 400),
        ({"pooling": "max"}, "pooling", 400),
        ({"normalize": "yes"}, "normalize", 400),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", 400),
        ({"model": "other"}, "model", 404),
        ({"user": 3}, "user", 400),
    ],
)
@pytest.mark.parametrize("path", [EMBEDDINGS, "/pooling"])
def test_bad_fields(served, refusal, path, fields, param, status):
    refusal(served.post(path, {"input": "hi", **fields}), status, param)
    assert served.llm.num_unfinished == 0
    assert served.context.admission.num_sequences == 0


def test_a_refused_input_is_told_by_number_and_ends_the_others(served, refusal):
    assert "input[2]" in refusal(served.post(EMBEDDINGS, {"input": ["a", "b", "", "c"]}), 400, "input")
    assert served.llm.num_unfinished == 0


def test_a_refusal_by_the_engine(served, refusal):
    served.engine.refuse = ("the step broke", None)
    refusal(served.post(EMBEDDINGS, {"input": ["a", "b"]}), 500, None)
    assert served.context.admission.num_sequences == 0


def test_a_client_that_goes_away_ends_its_inputs(served):
    served.engine.hold = True

    async def gone():
        while len(served.engine.added) < 2:
            await asyncio.sleep(0)

    served.asgi("POST", EMBEDDINGS, {"input": ["a", "b"]}, gone=gone)
    assert len(served.engine.aborted) == 2
    assert served.llm.num_unfinished == 0
    assert served.context.admission.num_sequences == 0


def test_other_tasks_are_refused(served, refusal):
    refusal(served.post("/pooling", {"input": "hi", "task": "classify"}), 501, "task")
    refusal(served.post("/pooling", {"input": "hi", "task": 3}), 400, "task")


@pytest.mark.parametrize("path", ["/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"])
def test_what_needs_another_model_says_so(served, refusal, path):
    assert "/v1/embeddings" in refusal(served.post(path, {"input": "hi"}), 501, "model")


@pytest.mark.parametrize("path", [EMBEDDINGS, "/pooling", "/classify", "/inference/v1/generate"])
def test_keys_guard_them(serve, refusal, path):
    refusal(serve(api_keys=("secret",)).post(path, {"input": "hi"}), 401, None)


def test_unknown_fields_are_named(served):
    response = served.post(EMBEDDINGS, {"input": "hi", "foo": 1})
    assert response.headers["x-llmkit-unknown-fields"] == "foo"
    assert response.json()["id"].startswith("embd-")
