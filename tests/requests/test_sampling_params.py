from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from llmkit.errors import InvalidRequestError
from llmkit.requests.sampling_params import MIN_TEMPERATURE, OutputKind, SamplingParams
from llmkit.requests.structured_outputs import StructuredOutputs

REFUSED = [
    ("n", 0),
    ("n", 16385),
    ("n", True),
    ("n", 1.5),
    ("n", "2"),
    ("presence_penalty", 2.1),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -2.01),
    ("frequency_penalty", True),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", math.inf),
    ("temperature", -0.1),
    ("temperature", 2.01),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", None),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_k", -2),
    ("top_k", 2.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 1.0),
    ("seed", False),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", {"a": 1}),
    ("stop", b"a"),
    ("stop", ["x"] * 257),
    ("stop", "x" * 4097),
    ("stop", [f"{i}" + "x" * 4000 for i in range(5)]),
    ("bad_words", [f"{i}" + "x" * 4000 for i in range(17)]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [2**31]),
    ("stop_token_ids", ["5"]),
    ("stop_token_ids", 5),
    ("stop_token_ids", range(5000)),
    ("ignore_eos", 1),
    ("ignore_eos", None),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2.0),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("logprobs", -2),
    ("logprobs", True),
    ("prompt_logprobs", -2),
    ("prompt_logprobs", "all"),
    ("detokenize", "no"),
    ("skip_special_tokens", 0),
    ("spaces_between_special_tokens", None),
    ("include_stop_str_in_output", "yes"),
    ("output_kind", "everything"),
    ("bad_words", [""]),
    ("bad_words", 3),
    ("logit_bias", {5: 100.5}),
    ("logit_bias", {5: math.nan}),
    ("logit_bias", {-1: 1}),
    ("logit_bias", {"five": 1}),
    ("logit_bias", [5, 1]),
    ("logit_bias", dict.fromkeys(range(70_000), 0)),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [1.0]),
    ("structured_outputs", {}),
    ("structured_outputs", {"regex": "a", "json_object": True}),
    ("structured_outputs", {"rexeg": "a"}),
    ("structured_outputs", "json"),
    ("structured_outputs", {"json": False}),
    ("structured_outputs", {"json": 5}),
    ("structured_outputs", {"choice": []}),
    ("structured_outputs", {"choice": [""]}),
    ("structured_outputs", {"regex": ""}),
    ("structured_outputs", {"grammar": 1}),
    ("structured_outputs", {"json_object": 1}),
    ("extra_args", ["a"]),
    ("extra_args", {1: 2}),
]


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_refused(field, value):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert str(caught.value.param).split(".")[0] == field
    assert caught.value.message.endswith(".")
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("field", "value", "kept"),
    [
        ("n", np.int64(3), 3),
        ("temperature", 0, 0.0),
        ("temperature", 1e-5, MIN_TEMPERATURE),
        ("temperature", 1e-30, MIN_TEMPERATURE),
        ("temperature", np.float32(0.5), 0.5),
        ("top_k", -1, 0),
        ("top_k", 100_000, 100_000),
        ("seed", -5, -5),
        ("stop", None, ()),
        ("stop", "x", ("x",)),
        ("stop", ["b", "a", "b"], ("b", "a")),
        ("stop_token_ids", [3, 1, 3], (3, 1)),
        ("stop_token_ids", None, ()),
        ("bad_words", "x", ("x",)),
        ("logit_bias", {"7": 1, 8: -100}, {7: 1.0, 8: -100.0}),
        ("logit_bias", {}, None),
        ("allowed_token_ids", range(3), (0, 1, 2)),
        ("max_tokens", None, None),
        ("logprobs", -1, -1),
        ("logprobs", 0, 0),
        ("output_kind", "delta", OutputKind.DELTA),
        ("structured_outputs", {"choice": ["a", "b"]}, StructuredOutputs(choice=("a", "b"))),
        ("structured_outputs", {"json": {"type": "object"}}, StructuredOutputs(json={"type": "object"})),
        ("extra_args", {"a": [1]}, {"a": [1]}),
    ],
)
def test_normalised(field, value, kept):
    assert getattr(SamplingParams(**{field: value}), field) == kept


def test_unknown_fields_are_errors():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)


@pytest.mark.parametrize("given", [{}, {"logit_bias": {1: 2.0}}, {"extra_args": {"a": 1}}])
def test_copies_with_other_values(given):
    params = SamplingParams(top_p=0.5, stop=["a"], **given)
    copied = params.with_values(seed=7, output_kind=OutputKind.DELTA)
    assert (params.seed, params.output_kind) == (None, OutputKind.CUMULATIVE)
    assert copied == SamplingParams(top_p=0.5, stop=["a"], seed=7, output_kind=OutputKind.DELTA, **given)
    assert copied.logit_bias is None or copied.logit_bias is not params.logit_bias


def test_nothing_changes_afterwards():
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0


def test_max_tokens_zero_is_for_scoring():
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0


def test_min_tokens_is_bounded_by_max_tokens_only_if_that_is_set():
    assert SamplingParams(max_tokens=None, min_tokens=100).min_tokens == 100
    with pytest.raises(InvalidRequestError, match=r"at most max_tokens \(16\), got 17"):
        SamplingParams(min_tokens=17)


def test_stop_strings_need_text():
    with pytest.raises(InvalidRequestError, match="detokenize"):
        SamplingParams(stop="a", detokenize=False)


def test_a_long_bad_value_is_cut_in_the_message():
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(temperature="x" * 10_000)
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("codec", [msgspec.msgpack, msgspec.json])
def test_survives_encoding(codec):
    params = SamplingParams(
        n=2,
        stop=["a"],
        stop_token_ids=[1],
        logit_bias={5: 1.5},
        allowed_token_ids=[1, 2],
        output_kind="final_only",
        structured_outputs={"json": {"type": "object"}},
        extra_args={"k": [1, {"a": None}]},
    )
    assert codec.decode(codec.encode(params), type=SamplingParams) == params


def test_decoding_checks_again():
    with pytest.raises(InvalidRequestError):
        msgspec.json.decode(b'{"top_p": 7.0}', type=SamplingParams)


def test_constraint_name():
    assert SamplingParams(structured_outputs={"json_object": True}).constraint.constraint == "json_object"
    assert SamplingParams().constraint is None


class Broken:
    """A value whose every method raises."""

    def _raise(self, *_):
        raise RuntimeError("broken")

    __repr__ = __index__ = __float__ = __iter__ = _raise


@pytest.mark.parametrize(
    "value",
    [Broken(), [Broken()], {Broken(): 1}, 10**5000, -(10**5000)],
    ids=["broken", "list", "mapping", "huge", "hugely negative"],
)
@pytest.mark.parametrize("field", SamplingParams.__struct_fields__)
def test_values_that_cannot_even_be_shown(field, value):
    """An integer of thousands of digits has no repr in Python; foreign objects raise what they like."""
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", [np.True_, bytearray(b"1")])
@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty", "n", "seed"])
def test_truth_and_bytes_are_no_numbers(field, value):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
