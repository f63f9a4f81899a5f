"""Short prompts with known greedy answers, and what sampling parameters do to them."""

from __future__ import annotations

import json
import math

import pytest

from llmkit import InvalidRequestError, SamplingParams

# Four usable blocks: a neighbour of 28 tokens takes the blocks of whoever came after it within ten steps.
PREEMPTING = {"num_blocks": 5, "max_model_len": 64, "enable_prefix_caching": False}
# A prompt that is answered with one more character of three tokens.
CHILLIES = "Repeat: 🌶🌶🌶\nRepeat: 🌶🌶🌶\nRepeat: 🌶🌶"
NEIGHBOUR = list(range(1000, 1028))


def test_known_answers(llm, facts, ids):
    assert ids(llm, facts.g1, temperature=0, max_tokens=12) == facts.g1_ids
    assert ids(llm, facts.g2, temperature=0, max_tokens=10) == facts.g2_ids
    assert ids(llm, facts.g3, temperature=0, max_tokens=8) == facts.g3_ids
    answer = llm.chat(facts.g4, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0]
    assert (answer.token_ids, answer.text) == (facts.g4_ids, "The answer is 4.")
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)


def test_defaults_come_from_the_model(llm, facts):
    output = llm.generate(facts.g1)[0]
    assert len(output.outputs[0].token_ids) <= 16
    assert llm.get_default_sampling_params(temperature=0.5).temperature == 0.5


# Stop strings


def test_almost_a_stop_appears_once(llm, facts):
    """B06."""
    params = SamplingParams(temperature=0, max_tokens=12, stop=["L P X", "Z9"])
    deltas = list(llm.stream(facts.g1, params))
    assert "".join(delta.outputs[0].text for delta in deltas) == " H I K L P Q R S T U V Z"
    assert sum(len(delta.outputs[0].token_ids) for delta in deltas) == 12
    assert deltas[-1].outputs[0].finish_reason == "length"


def test_stop_strings_wait_for_min_tokens(llm, facts):
    """B08 a: the stop string that the sixth token completes counts."""
    params = SamplingParams(temperature=0, max_tokens=20, stop=",", min_tokens=6)
    answer = llm.generate(facts.g2, params)[0].outputs[0]
    assert (answer.text, answer.token_ids) == (" six, seven, eight", facts.g2_ids[:6])
    assert (answer.finish_reason, answer.stop_reason) == ("stop", ",")


def test_a_stop_string_ends_the_request_in_the_engine(llm, facts):
    """B74 without speculation: text, ids and logprobs end together."""
    params = SamplingParams(temperature=0, max_tokens=64, stop=" ha ha ha", logprobs=1)
    answer = llm.generate(facts.g3, params)[0].outputs[0]
    assert (answer.text, answer.token_ids, len(answer.logprobs)) == ("h", facts.g3_ids[:4], 4)
    assert llm.stats().num_unfinished == 0


def test_all_ends_of_sequence_wait_for_min_tokens(smollm2_folder, make_llm, facts, tmp_path):
    """B08 b: generation_config.json lists two."""
    for file in smollm2_folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 30]}))
    llm = make_llm(tmp_path)
    stopped = llm.chat(facts.g4, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0]
    assert (stopped.token_ids, stopped.finish_reason) == (facts.g4_ids[:6], "stop")
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=12)
    forced = llm.chat(facts.g4, params)[0].outputs[0].token_ids
    assert len(forced) >= 12
    assert not {2, 30} & set(forced[:12])
    # The folder is the GGUF's twin.
    assert llm.generate(facts.g1, SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].token_ids == facts.g1_ids


# Log-probabilities


def test_impossible_tokens_leave_the_sampled_ones_finite(llm, facts):
    """B10."""
    params = SamplingParams(temperature=0, max_tokens=2, allowed_token_ids=[30], logprobs=5)
    answer = llm.generate(facts.g1, params)[0].outputs[0]
    assert answer.token_ids == [30, 30]
    for entry in answer.logprobs:
        assert entry.token_ids[0] == 30
        assert math.isfinite(entry.logprobs[0])
        assert not any(math.isnan(value) for value in entry.logprobs)


def test_numbers_of_logprobs(llm, facts):
    """B14."""

    def answer(**params):
        return llm.generate(facts.g1, SamplingParams(temperature=0, max_tokens=2, **params))[0].outputs[0]

    assert answer().logprobs is None
    assert [entry.token_ids for entry in answer(logprobs=0).logprobs] == [[i] for i in facts.g1_ids[:2]]
    for entry, sampled in zip(answer(logprobs=3).logprobs, facts.g1_ids, strict=False):
        assert entry.token_ids[0] == sampled
        assert len(entry.token_ids) == 4
        assert entry.ranks[0] == 1
    for wrong in (60_000, -1, 21):
        with pytest.raises(InvalidRequestError, match="logprobs"):
            answer(logprobs=wrong)
    with pytest.raises(InvalidRequestError, match="logprobs"):
        answer(logprobs=-2)


def test_prompt_logprobs_do_not_depend_on_cache_and_chunks(llm, make_llm, golden):
    """Whole, from the prefix cache, and in chunks of 16."""
    prompt = golden[10]["prompt_token_ids"]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    llm.reset_prefix_cache()
    whole, again = (llm.generate(prompt, params)[0] for _ in range(2))
    chunked = make_llm(max_num_batched_tokens=16).generate(prompt, params)[0]
    for output in (whole, again, chunked):
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        assert [entry.token_ids[0] for entry in output.prompt_logprobs[1:]] == prompt[1:]
        for entry, reference in zip(output.prompt_logprobs[1:], whole.prompt_logprobs[1:], strict=True):
            assert entry.logprobs == pytest.approx(reference.logprobs, abs=1e-3)


# Sampling


def test_answers_of_one_request_differ_and_repeat(llm, facts):
    """B16."""

    def four():
        params = SamplingParams(n=4, seed=7, temperature=1.5, max_tokens=24)
        output = llm.generate(facts.g3, params)[0]
        assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
        return [completion.token_ids for completion in output.outputs]

    first = four()
    assert len({tuple(ids) for ids in first}) > 1
    assert four() == first


def test_a_seeded_answer_does_not_depend_on_its_neighbours(llm, make_llm, facts, ids):
    """B18: alone, as any row, beside requests that end early, after preemption."""
    seeded = SamplingParams(seed=42, temperature=0.8, max_tokens=16)
    free = SamplingParams(temperature=1.5, max_tokens=20)
    short = SamplingParams(temperature=1.5, max_tokens=3)
    alone = ids(llm, facts.g1, seed=42, temperature=0.8, max_tokens=16)
    for prompts, params, row in [
        ([facts.g1, facts.g2], [seeded, free], 0),
        ([facts.g2, facts.g1], [free, seeded], 1),
        ([facts.g2, facts.g3, facts.g1], [short, short, seeded], 2),
    ]:
        for _ in range(2):
            assert llm.generate(prompts, params)[row].outputs[0].token_ids == alone
    tiny = make_llm(**PREEMPTING)
    outputs = tiny.generate([NEIGHBOUR, facts.g1], [SamplingParams(max_tokens=30, ignore_eos=True), seeded])
    assert tiny.stats().num_preemptions > 0
    assert outputs[1].outputs[0].token_ids == alone
    two = llm.generate([facts.g1, facts.g1], free)
    assert two[0].outputs[0].token_ids != two[1].outputs[0].token_ids


def test_penalties_count_what_was_generated(llm, make_llm, facts, ids):
    """B20."""
    assert ids(llm, facts.g3, temperature=0, max_tokens=1, frequency_penalty=2, presence_penalty=2) == [88]

    def score(**params):
        sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=20, **params)
        entry = llm.generate(facts.g3, sampling)[0].outputs[0].logprobs[0]
        return dict(zip(entry.token_ids, entry.logprobs, strict=True)).get(421, -math.inf)

    assert score(repetition_penalty=1.5) < score() - 0.5
    params = {"temperature": 0, "max_tokens": 24, "frequency_penalty": 1, "ignore_eos": True}
    expected = ids(llm, facts.g3, **params)
    tiny = make_llm(**PREEMPTING)
    outputs = tiny.generate([NEIGHBOUR, facts.g3], SamplingParams(**params))
    assert tiny.stats().num_preemptions > 0
    assert outputs[1].outputs[0].token_ids == expected


def test_tiny_temperatures_are_greedy(llm, facts, ids):
    """B22."""
    for temperature in (1e-3, 1e-4, 1e-5, 1e-6, 1e-30):
        assert ids(llm, facts.g1, temperature=temperature, seed=1, max_tokens=12) == facts.g1_ids


def test_top_k_of_the_vocabulary_is_off(llm, facts, ids):
    """B22."""
    params = {"temperature": 1.5, "seed": 3, "max_tokens": 12}
    off = [ids(llm, facts.g1, top_k=k, **params) for k in (-1, 0, 49_152, 100_000)]
    assert off[0] != facts.g1_ids
    assert all(answer == off[0] for answer in off)
    assert len(ids(llm, facts.g1, top_k=49_151, **params)) == 12


def test_bad_words(llm, facts):
    """B24: a heavy bias towards ` exaggerated` does not bring the banned word back."""
    params = SamplingParams(temperature=0, max_tokens=6, logit_bias={24098: 100})
    assert "exaggerated" in llm.generate(facts.g1, params)[0].outputs[0].text
    params = SamplingParams(temperature=0, max_tokens=6, logit_bias={24098: 100}, bad_words=["exaggerated"])
    assert "exaggerated" not in llm.generate(facts.g1, params)[0].outputs[0].text
    request = llm._inputs.prepare(facts.g1, params).engine_request
    assert set(request.bad_words_ids) == {(24098,), (888, 12895, 483)}
    forced = SamplingParams(temperature=0, max_tokens=3, logit_bias={888: 100}, bad_words=["exaggerated"])
    assert llm.generate(facts.g1, forced)[0].outputs[0].token_ids == [888, 888, 888]
    harmless = SamplingParams(temperature=0, max_tokens=12, bad_words=["\u0004"])
    assert llm.generate(facts.g1, harmless)[0].outputs[0].token_ids == facts.g1_ids


# Text


def test_characters_of_several_tokens(llm):
    """B02 c: the answer ends in half a character, streamed and not."""
    prompt = CHILLIES
    assert llm.encode("🌶") == [10813, 230, 131]
    whole = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=3))[0].outputs[0]
    assert whole.text == "🌶"
    params = SamplingParams(temperature=0, max_tokens=2)
    cut = llm.generate(prompt, params)[0].outputs[0]
    streamed = list(llm.stream(prompt, params))
    assert cut.text == "" == "".join(delta.outputs[0].text for delta in streamed)
    assert (len(cut.token_ids), cut.finish_reason) == (2, "length")
    stream = llm.stream(prompt, params)
    assert next(stream).outputs[0].text == ""
    stream.close()


def test_logprobs_of_partial_characters_have_their_own_bytes(llm):
    """B12."""
    answer = llm.generate(CHILLIES, SamplingParams(temperature=0, max_tokens=3, logprobs=2))[0].outputs[0]
    pieces = [llm.tokenizer.token_bytes(entry.token_ids[0]) for entry in answer.logprobs]
    assert b"".join(pieces).decode() == "🌶"
    assert all(b"\xef\xbf\xbd" not in piece for piece in pieces)


def test_a_family_comes_whole(llm):
    """B02 a: the model's own tokens of a character of 18 bytes."""
    from llmkit.frontend.detokenizer import build_detokenizer

    ids = [10813, 235, 118, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117]
    detokenizer = build_detokenizer(llm.tokenizer, [])
    deltas = [detokenizer.append(token_id) for token_id in ids]
    assert "".join(deltas) == "👨\u200d👩\u200d👧" == llm.decode(ids)
    assert not any("\ufffd" in delta for delta in deltas)


def test_log_probabilities_under_truncation(llm, facts):
    """B10: what top_k rules out is not in the numbers, which are of the distribution before it."""
    params = SamplingParams(temperature=1, top_k=1, max_tokens=2, logprobs=5, prompt_logprobs=1, seed=1)
    output = llm.generate(facts.g1, params)[0]
    assert output.outputs[0].token_ids == facts.g1_ids[:2]
    entries = [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]]
    assert all(math.isfinite(value) for entry in entries for value in entry.logprobs)


def test_texts_that_lose_their_characters(llm, facts, ids):
    """B26: U+40000 has no first byte in this vocabulary; as a stop string or a bad word it just never occurs."""
    lost = "\U00040000"
    for params in ({"stop": [lost]}, {"bad_words": [lost]}, {"bad_words": [lost, "Zebra"]}):
        assert ids(llm, facts.g1, temperature=0, max_tokens=12, **params) == facts.g1_ids
