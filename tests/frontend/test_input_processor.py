"""What is refused at the door, and what passes it."""

from __future__ import annotations

import itertools
import json

import msgspec
import numpy as np
import pytest

from llmkit.errors import InvalidRequestError
from llmkit.frontend.chat_template import ChatTemplate
from llmkit.frontend.prompts import RequestOptions
from llmkit.hookspecs.structured import GrammarRequest
from llmkit.requests.grammar_task import GrammarTask
from llmkit.requests.message import EngineRequest
from llmkit.requests.sampling_params import SamplingParams

EOS = 257


def refusal(processor, prompt, params=None, options=None, **kwargs):
    with pytest.raises(InvalidRequestError) as caught:
        processor.prepare(prompt, params or SamplingParams(), options, **kwargs)
    return caught.value


def test_a_plain_request(make_processor, byte_tokenizer):
    prepared = make_processor(byte_tokenizer).prepare("hi", SamplingParams(max_tokens=3, stop_token_ids=[5]))
    request = prepared.engine_request
    assert (prepared.prompt, request.prompt_token_ids, request.max_tokens) == ("hi", [104, 105], 3)
    assert request.stop_token_ids == {5, EOS}
    assert request.eos_token_ids == {EOS}
    assert request.sampling_params.seed is not None


def test_ignore_eos_leaves_only_the_users_stop_ids(make_processor, byte_tokenizer):
    params = SamplingParams(ignore_eos=True, stop_token_ids=[EOS])
    request = make_processor(byte_tokenizer).prepare("hi", params).engine_request
    assert (request.stop_token_ids, request.eos_token_ids) == ({EOS}, frozenset())


def test_seeds_are_drawn_only_where_absent(make_processor, byte_tokenizer):
    processor = make_processor(byte_tokenizer)
    seeds = {processor.prepare("hi", SamplingParams()).engine_request.sampling_params.seed for _ in range(20)}
    assert len(seeds) == 20
    assert processor.prepare("hi", SamplingParams(seed=7)).engine_request.sampling_params.seed == 7


@pytest.mark.parametrize("prompt", ["", [], {"prompt": ""}, {"prompt_token_ids": []}, "\u0004", "\u0013\u0014"])
def test_prompts_without_tokens(make_processor, byte_tokenizer, prompt):
    """B26."""
    assert refusal(make_processor(byte_tokenizer), prompt).param == "prompt"


def test_characters_without_token_are_dropped(make_processor, byte_tokenizer):
    request = make_processor(byte_tokenizer).prepare("\u0004hi", SamplingParams()).engine_request
    assert request.prompt_token_ids == [104, 105]


@pytest.mark.parametrize(
    "prompt",
    [
        *(None, 5, b"hi", ["hi"], [1.5], [True], [[1]], [258], [-1]),
        *({}, {"prompt": 5}, {"prompt": "a", "messages": []}, {"foo": 1}),
    ],
)
def test_malformed_prompts(make_processor, byte_tokenizer, prompt):
    assert refusal(make_processor(byte_tokenizer), prompt).param == "prompt"


def test_token_ids_of_any_integer_type(make_processor, byte_tokenizer):
    import numpy as np

    request = make_processor(byte_tokenizer).prepare(np.array([1, 2]), SamplingParams()).engine_request
    assert request.prompt_token_ids == [1, 2]
    assert all(type(token_id) is int for token_id in request.prompt_token_ids)


@pytest.mark.parametrize("unhashable", [True, False])
def test_token_ids_of_a_type_that_passes_for_another(make_processor, byte_tokenizer, unhashable):
    class Meta(type):
        __hash__ = None if unhashable else lambda _: hash(int)
        __eq__ = lambda _, other: other is int  # noqa: E731

    class Number(metaclass=Meta):
        def __index__(self):
            return 7

    request = make_processor(byte_tokenizer).prepare([1, Number()], SamplingParams()).engine_request
    assert request.prompt_token_ids == [1, 7]


def test_what_is_changed_afterwards_is_not_the_requests(make_processor, byte_tokenizer):
    """Parameters are fixed, the dictionary in them is the caller's."""
    processor, params = make_processor(byte_tokenizer), SamplingParams(logit_bias={5: 1.0}, max_tokens=3)
    taken = processor.prepare("hi", params).engine_request.sampling_params
    params.logit_bias[9] = 100.0
    assert taken.logit_bias == {5: 1.0}
    params.logit_bias["x"] = 1.0
    assert refusal(processor, "hi", params).param == "logit_bias"


def test_lengths_at_the_models_limit(make_processor, byte_tokenizer):
    """B28: no negative number anywhere, the total never exceeds the limit."""
    processor = make_processor(byte_tokenizer)
    assert processor.prepare([30] * 63, SamplingParams(max_tokens=1)).engine_request.max_tokens == 1
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=1)
    assert processor.prepare([30] * 64, scoring).engine_request.max_tokens == 0
    assert processor.prepare([30] * 60, SamplingParams(max_tokens=100)).engine_request.max_tokens == 4
    assert processor.prepare([30] * 63, SamplingParams(max_tokens=None)).engine_request.max_tokens == 1
    full = str(refusal(processor, [30] * 64, SamplingParams(max_tokens=1)))
    assert "64" in full
    assert "1 is to be" in full
    over = str(refusal(processor, [30] * 65, SamplingParams(max_tokens=1)))
    assert "65" in over
    assert "64" in over
    assert "-" not in full + over


def test_truncation_keeps_the_end(make_processor, byte_tokenizer):
    processor = make_processor(byte_tokenizer)

    def kept(limit, params=None):
        options = RequestOptions(truncate_prompt_tokens=limit)
        return processor.prepare(list(range(100)), params or SamplingParams(), options).engine_request.prompt_token_ids

    assert kept(10) == list(range(90, 100))
    assert kept(-1) == list(range(37, 100))
    assert len(kept(64, SamplingParams(max_tokens=0, prompt_logprobs=0))) == 64
    for limit in (0, -2, 64, True, "10"):
        error = refusal(processor, [1], options=RequestOptions(truncate_prompt_tokens=limit))
        assert error.param == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"logit_bias": {258: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [1, 300]}, "allowed_token_ids"),
        ({"stop_token_ids": [258]}, "stop_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 60000}, "prompt_logprobs"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"allowed_token_ids": [5, EOS], "stop_token_ids": [5], "min_tokens": 1}, "allowed_token_ids"),
    ],
)
def test_parameters_that_do_not_fit_the_model(make_processor, byte_tokenizer, params, field):
    assert refusal(make_processor(byte_tokenizer), "hi", SamplingParams(**params)).param == field


def test_all_logprobs_where_the_limit_allows(make_processor, byte_tokenizer):
    """B14: -1 is the vocabulary."""
    processor = make_processor(byte_tokenizer, max_logprobs=1000)
    request = processor.prepare("hi", SamplingParams(logprobs=-1)).engine_request
    assert request.sampling_params.logprobs == 258
    assert refusal(processor, "hi", SamplingParams(logprobs=300)).param == "logprobs"


def test_bad_words_are_banned_with_and_without_space(make_processor, make_byte_tokenizer):
    """B24: the spaced form has another number of tokens than the bare one."""
    processor = make_processor(make_byte_tokenizer(["ex", "agger", "ated", " exaggerated"]))
    assert processor.bad_words_ids(["exaggerated"]) == ((258, 259, 260), (261,))
    assert processor.bad_words_ids([" exaggerated"]) == ((261,),)


def test_bad_words_are_tokenised_once_for_all_prompts(make_processor, byte_tokenizer, monkeypatch):
    processor, encoded = make_processor(byte_tokenizer), []
    encode = byte_tokenizer.encode
    monkeypatch.setattr(byte_tokenizer, "encode", lambda text, **more: encoded.append(text) or encode(text, **more))
    params = SamplingParams(bad_words=["xy"])
    requests = [processor.prepare([1, 2], params).engine_request for _ in range(3)]
    assert [request.bad_words_ids for request in requests] == [((120, 121), (32, 120, 121))] * 3
    assert encoded == ["xy", " xy"]


def test_bad_words_without_tokens_ban_nothing(make_processor, byte_tokenizer):
    """B26: what is left of them (a lone space, some bytes) is not banned."""
    assert make_processor(byte_tokenizer).bad_words_ids(["\u0004", "a\u0013"]) == ()


def test_without_tokenizer(make_processor):
    processor = make_processor(None)
    assert processor.prepare([1, 2], SamplingParams()).prompt is None
    assert refusal(processor, "hi").param == "prompt"
    assert refusal(processor, {"messages": [{"role": "user", "content": "x"}]}).param == "prompt"
    assert refusal(processor, [1], SamplingParams(stop="x")).param == "stop"
    assert refusal(processor, [1], SamplingParams(bad_words="x")).param == "bad_words"


def test_chats(make_processor, byte_tokenizer):
    chat = {"messages": [{"role": "user", "content": "x"}]}
    assert "no chat template" in str(refusal(make_processor(byte_tokenizer), chat))
    processor = make_processor(byte_tokenizer, ChatTemplate("^{{ messages[0].content }}", {}))
    prepared = processor.prepare(chat, SamplingParams())
    assert prepared.engine_request.prompt_token_ids == list(b"^x"), "special tokens are the template's business"
    assert processor.prepare("^x", SamplingParams()).engine_request.prompt_token_ids == [256, *b"^x"]


def test_request_ids_are_unique_inside_and_the_users_outside(make_processor, byte_tokenizer):
    """B42."""
    processor = make_processor(byte_tokenizer)
    both = [processor.prepare("hi", SamplingParams(), RequestOptions(request_id="x")) for _ in range(2)]
    assert [prepared.request_id for prepared in both] == ["x", "x"]
    assert len({prepared.engine_request.request_id for prepared in both}) == 2
    for bad in ("", "a\nb", "x" * 10_000, 5):
        assert refusal(processor, "hi", options=RequestOptions(request_id=bad)).param == "request_id"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"priority": "high"}, "priority"),
        ({"priority": 2**40}, "priority"),
        ({"user": 5}, "user"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_bad_options(make_processor, byte_tokenizer, options, field):
    assert refusal(make_processor(byte_tokenizer), "hi", options=RequestOptions(**options)).param == field


def test_options_travel(make_processor, byte_tokenizer):
    options = RequestOptions(priority=3, user="u", cache_salt="s")
    request = make_processor(byte_tokenizer).prepare("hi", SamplingParams(), options).engine_request
    assert (request.priority, request.user, request.cache_salt) == (3, "u", "s")
    salted = make_processor(byte_tokenizer).prepare({"prompt": "hi", "cache_salt": "t"}, SamplingParams())
    assert salted.engine_request.cache_salt == "t"


class BrokenIndex:
    def __index__(self):
        raise RuntimeError("broken")


def broken_iterator():
    yield 1
    raise RuntimeError("broken")


@pytest.mark.parametrize(
    "prompt",
    [
        [None],
        [1, None],
        [BrokenIndex()],
        [1.5],
        [[1]],
        broken_iterator(),
        itertools.repeat(1),
        np.array([[1, 2]]),
        np.array([1.0]),
        [np.array([1, 2])],
        [10**5000],
        {"prompt_token_ids": [10**5000]},
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_prompts_of_other_things(make_processor, byte_tokenizer, prompt):
    error = refusal(make_processor(byte_tokenizer), prompt)
    assert error.param == "prompt"
    assert len(str(error)) < 300


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (5, "options"),
        ({"request_id": "a"}, "options"),
        (RequestOptions(add_special_tokens=5), "add_special_tokens"),
        (RequestOptions(priority=10**5000), "priority"),
        (RequestOptions(truncate_prompt_tokens=10**5000), "truncate_prompt_tokens"),
    ],
    ids=["int", "dict", "flag", "priority", "truncation"],
)
def test_options_of_other_things(make_processor, byte_tokenizer, options, param):
    assert refusal(make_processor(byte_tokenizer), "hi", options=options).param == param


def test_a_schema_with_numbers_that_no_message_can_hold_travels(make_processor, byte_tokenizer):
    schema = {"type": "integer", "maximum": 2**64}
    task = GrammarTask(GrammarRequest("json_schema", json.dumps(schema)), ("xgrammar",))
    params = SamplingParams(structured_outputs={"json": schema})
    request = make_processor(byte_tokenizer).prepare("x", params, grammar=task).engine_request
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineRequest).grammar == task
