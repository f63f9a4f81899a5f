"""What is refused, what fails alone, and what never gets in each other's way."""

from __future__ import annotations

import random
import time

import msgspec
import pytest

from llmkit import LLM, InvalidRequestError, RequestOptions, SamplingParams
from llmkit.requests.message import PriorOutput


@pytest.mark.parametrize("prompt", ["", [], [[]], ["", "hi"], "\u0004", "\u0013\u0014", ["hi", "\u0004"]])
def test_empty_prompts_are_refused_as_a_whole(llm, prompt):
    """B26."""
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(prompt)
    assert caught.value.param == "prompt"
    if prompt in (["", "hi"], ["hi", "\u0004"]):
        assert f"prompts[{prompt.index('') if '' in prompt else 1}]" in str(caught.value)
    assert llm.stats().num_unfinished == 0


def test_empty_chats(llm):
    """B26."""
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.chat([])
    output = llm.chat([{"role": "user", "content": "\u0004"}], SamplingParams(temperature=0, max_tokens=2))[0]
    assert len(output.outputs[0].token_ids) == 2
    assert llm.generate("\u0004hi", SamplingParams(max_tokens=1))[0].prompt_token_ids == llm.encode("hi")


def test_prompts_around_the_models_length(make_llm):
    """B28."""
    llm = make_llm(max_model_len=64, max_num_batched_tokens=64)

    def answer(n, **params):
        output = llm.generate([30] * n, SamplingParams(temperature=0, ignore_eos=True, **params))[0]
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) <= 64
        return output

    one = answer(63, max_tokens=1).outputs[0]
    assert (len(one.token_ids), one.finish_reason) == (1, "length")
    assert len(answer(63, max_tokens=None).outputs[0].token_ids) == 1
    scored = answer(64, max_tokens=0, prompt_logprobs=1)
    assert len(scored.prompt_logprobs) == 64
    assert (scored.outputs[0].token_ids, scored.outputs[0].finish_reason) == ([], "length")
    four = answer(60, max_tokens=100).outputs[0]
    assert (len(four.token_ids), four.finish_reason) == (4, "length")
    for n, numbers in ((64, ("64", "1")), (65, ("65", "64"))):
        with pytest.raises(InvalidRequestError) as caught:
            answer(n, max_tokens=1)
        assert all(number in str(caught.value) for number in numbers)
        assert "-" not in str(caught.value)
    options = RequestOptions(truncate_prompt_tokens=10)
    assert llm.generate([30] * 100, SamplingParams(max_tokens=1), options=options)[0].prompt_token_ids == [30] * 10


def test_a_final_message_is_continued(llm):
    """B30."""
    chat = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "The answer is "}]
    output = llm.chat(chat, SamplingParams(temperature=0, max_tokens=2), continue_final_message=True)[0]
    assert output.prompt.endswith("<|im_start|>assistant\nThe answer is ")
    with pytest.raises(InvalidRequestError, match="exclude"):
        llm.chat(chat, continue_final_message=True, add_generation_prompt=True)


def test_templates_that_refuse(make_llm, facts, ids):
    """B32: refusal, and missing template; completions work all the while."""
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}x"
    llm = make_llm(chat_template=template)
    with pytest.raises(InvalidRequestError, match="System role not supported"):
        llm.chat([{"role": "system", "content": "Be brief."}])
    assert ids(llm, facts.g1, temperature=0, max_tokens=3) == facts.g1_ids[:3]


def test_any_role_that_the_template_takes(llm):
    """B32: the model's own template shows whatever role there is."""
    output = llm.chat([{"role": "wizard", "content": "hi"}], SamplingParams(max_tokens=1))[0]
    assert "<|im_start|>wizard\nhi" in output.prompt


@pytest.fixture(scope="module")
def prefix():
    """Four blocks of any tokens."""
    numbers = random.Random(5)
    return [numbers.randrange(100, 40_000) for _ in range(64)]


@pytest.fixture(scope="module")
def uncached(smollm2_gguf, settings, prefix):
    """What an engine without a prefix cache says after `prefix` and 30."""
    with LLM(smollm2_gguf, **settings | {"enable_prefix_caching": False}) as plain:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        return list(plain.generate([*prefix, 30], params)[0].outputs[0].token_ids)


@pytest.mark.parametrize("end", ["aborted", "preempted"])
def test_unfilled_blocks_are_never_hit(make_llm, prefix, uncached, end):
    """B36: the owner of a shared prefix is aborted, or preempted, between two chunks."""
    llm = make_llm(max_num_batched_tokens=24)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = uncached
    core = llm.engine.core
    first, second = (llm._inputs.prepare([*prefix, 30], params).engine_request for _ in range(2))
    core.add(first)
    core.add(second)
    core.step()
    (owner,) = core.scheduler.running.snapshot()
    assert (owner.request_id, owner.num_computed_tokens) == (first.request_id, 24)
    if end == "aborted":
        core.abort([first.request_id])
    else:
        core.scheduler._lifecycle.preempt(owner, step=1)
    answers = {first.request_id: [], second.request_id: []}
    while core.has_work():
        for output in core.step():
            answers[output.request_id] += output.new_token_ids
    assert answers[second.request_id] == expected
    assert answers[first.request_id] == (expected if end == "preempted" else [])
    assert llm.generate([*prefix, 30], params)[0].outputs[0].token_ids == expected
    assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_requests_that_the_cache_can_never_hold(make_llm, facts):
    """B38: 8 usable blocks of 16 tokens."""
    llm = make_llm(num_blocks=9, max_model_len=512)
    numbers = random.Random(1)
    small, params = facts.g1, SamplingParams(temperature=0, max_tokens=5)

    def prompt(length):
        return [numbers.randrange(100, 40_000) for _ in range(length)]

    start = time.process_time()
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\].*128"):
        llm.generate([small, prompt(200)], params)
    assert time.process_time() - start < 5
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    grown, after = llm.generate([prompt(100), small], [long, params])
    assert grown.outputs[0].finish_reason == "length"
    assert len(grown.outputs[0].token_ids) == 28
    exact = SamplingParams(temperature=0, max_tokens=28, ignore_eos=True)
    whole, after_too = llm.generate([prompt(100), small], [exact, params])
    assert len(whole.outputs[0].token_ids) == 28
    assert after.outputs[0].token_ids == after_too.outputs[0].token_ids == facts.g1_ids[:5]
    assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_equal_request_ids_do_not_mix(llm, facts):
    """B42."""
    options = RequestOptions(request_id="same")
    params = SamplingParams(temperature=0, max_tokens=8)
    one, two = llm.stream(facts.g1, params, options=options), llm.stream(facts.g2, params, options=options)
    texts = ["", ""]
    for outputs in zip(one, two, strict=True):
        for i, output in enumerate(outputs):
            assert output.request_id == "same"
            texts[i] += output.outputs[0].text
    assert texts == [llm.decode(facts.g1_ids[:8]), llm.decode(facts.g2_ids[:8])]


def test_aborted_and_added_again_many_times(llm, facts):
    """B42."""
    options = RequestOptions(request_id="x")
    for _ in range(50):
        stream = llm.stream(facts.g1, SamplingParams(temperature=0, max_tokens=50), options=options)
        assert next(stream).outputs[0].token_ids == facts.g1_ids[:1]
        stream.close()
    assert llm.stats().num_unfinished == 0
    assert len(llm._loop._outputs) == 0


def test_cached_tokens_are_those_of_other_requests(make_llm):
    """B66: recomputation after preemption is no prefix hit."""
    numbers = random.Random(3)
    prompts = [[numbers.randrange(100, 40_000) for _ in range(40)] for _ in range(8)]
    llm = make_llm(num_blocks=20, max_model_len=128)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    stats = llm.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_hit_tokens == 0
    assert [output.num_cached_tokens for output in outputs] == [0] * 8
    one = SamplingParams(temperature=0, max_tokens=1)
    llm.generate(prompts[0], one)
    again = llm.generate(prompts[0], one)[0]
    assert again.num_cached_tokens == 32 < len(prompts[0])


def test_cache_salt_separates(llm):
    numbers = random.Random(9)
    prompt = {"prompt_token_ids": [numbers.randrange(100, 40_000) for _ in range(40)]}
    params = SamplingParams(temperature=0, max_tokens=1)
    cached = [
        llm.generate(prompt | salt, params)[0].num_cached_tokens
        for salt in ({}, {}, {"cache_salt": "a"}, {"cache_salt": "a"})
    ]
    assert cached == [0, 32, 0, 32]


def test_a_bad_prompt_in_a_list_is_named(llm):
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\].*49152"):
        llm.generate([[1], [49_152]])
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]"):
        llm.chat([[{"role": "user", "content": "x"}], [{"role": "user", "content": 5}]])


def test_grammars_are_refused(llm, facts):
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        llm.generate(facts.g1, SamplingParams(structured_outputs={"regex": "(?=a)"}))


def test_streams_and_batches_at_the_same_time(llm, facts):
    stream = llm.stream(facts.g1, SamplingParams(temperature=0, max_tokens=12))
    got = list(next(stream).outputs[0].token_ids)
    other = llm.generate(facts.g2, SamplingParams(temperature=0, max_tokens=10))[0].outputs[0].token_ids
    got += [i for output in stream for i in output.outputs[0].token_ids]
    assert (got, other) == (facts.g1_ids, facts.g2_ids)


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.2, "top_p": 0.95, "seed": 11}])
def test_an_answer_goes_on_after_a_restart(llm, make_llm, facts, params):
    """Another engine is given the tokens that the first one has produced; the rest is the same, seeded or greedy."""
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, frequency_penalty=0.5, **params)
    whole = llm.generate(facts.g1, sampling)[0].outputs[0].token_ids
    request = llm._inputs.prepare(facts.g1, sampling).engine_request
    core = make_llm().engine.core
    core.add(msgspec.structs.replace(request, prior_outputs=(PriorOutput(tuple(whole[:5])),)))
    rest = []
    while core.has_work():
        rest += [i for output in core.step() for i in output.new_token_ids]
    assert rest == whole[5:]
