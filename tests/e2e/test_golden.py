"""20 greedy continuations of the reference in float32, token for token, whatever the engine does around them.

All 20 in one batch, twice; where anything else is different, some of them by default, all with LLMKIT_DEEP_TESTS=1.
"""

from __future__ import annotations

import os

import msgspec
import pytest

DEEP = os.environ.get("LLMKIT_DEEP_TESTS") == "1"


def part_of(every: int, first: int = 0) -> slice:
    """Every so manieth prompt by default."""
    return slice(None) if DEEP else slice(first, None, every)


def test_all_in_one_batch_and_again_from_the_prefix_cache(llm, golden_prompts, golden_params, check_golden):
    assert llm.reset_prefix_cache()
    check_golden(llm.generate(golden_prompts, golden_params))
    hits_before = llm.stats().prefix_hit_tokens
    check_golden(llm.generate(golden_prompts, golden_params))
    assert llm.stats().prefix_hit_tokens > hits_before


def test_each_alone(llm, golden_prompts, golden_params, check_golden):
    part = part_of(3)
    llm.reset_prefix_cache()
    check_golden([llm.generate(prompt, golden_params)[0] for prompt in golden_prompts[part]], part)


def test_tokenizer_and_chat_template_make_the_same_prompts(llm, golden):
    for item in golden:
        if item["messages"] is None:
            assert llm.encode(item["prompt"]) == item["prompt_token_ids"]
    chats = [item for item in golden if item["messages"] is not None]
    outputs = llm.chat([item["messages"] for item in chats], llm.get_default_sampling_params(max_tokens=1))
    assert [output.prompt_token_ids for output in outputs] == [item["prompt_token_ids"] for item in chats]
    assert [output.prompt for output in outputs] == [item["prompt"] for item in chats]


def test_logprobs_of_the_golden_tokens(llm, golden, golden_prompts, golden_params):
    params = msgspec.structs.replace(golden_params, logprobs=1)
    for item, output in zip(golden, llm.generate(golden_prompts, params), strict=True):
        logprobs = [entry.logprobs[0] for entry in output.outputs[0].logprobs]
        assert logprobs == pytest.approx(item["logprobs"], abs=2e-3)
        assert output.outputs[0].cumulative_logprob == pytest.approx(sum(logprobs))


def test_with_all_threads(make_llm, golden_prompts, golden_params, check_golden):
    """A quarter of the prompts: threads wait for one another at every product, long where they share a processor."""
    part = slice(None, None, 4)
    check_golden(make_llm(num_threads=None).generate(golden_prompts[part], golden_params), part)


def test_token_budget_of_16(make_llm, golden_prompts, golden_params, check_golden):
    part = part_of(2, 1)
    check_golden(make_llm(max_num_batched_tokens=16).generate(golden_prompts[part], golden_params), part)


def test_a_pool_so_small_that_requests_are_preempted(make_llm, golden_prompts, golden_params, check_golden):
    part = part_of(2, 1)
    llm = make_llm(num_blocks=20, max_model_len=256)
    check_golden(llm.generate(golden_prompts[part], golden_params), part)
    stats = llm.stats()
    assert stats.num_preemptions > 0
    assert stats.num_free_blocks == stats.num_blocks


def test_a_pool_so_small_that_requests_are_swapped(make_llm, golden_prompts, golden_params, check_golden):
    part = part_of(2)
    llm = make_llm(num_blocks=20, max_model_len=256, scheduler="classic")
    check_golden(llm.generate(golden_prompts[part], golden_params), part)
    stats = llm.stats()
    assert stats.num_swaps == stats.num_preemptions > 0
    assert (stats.num_free_blocks, stats.num_free_host_blocks) == (stats.num_blocks, stats.num_host_blocks)


@pytest.mark.parametrize(("name", "first"), [("priority", 0), ("fair", 1), ("srtf", 2)])
def test_other_schedulers(make_llm, golden_prompts, golden_params, check_golden, name, first):
    """In so small a pool that who yields matters; a third of the prompts each by default."""
    part = part_of(3, first)
    prompts = golden_prompts[part]
    llm = make_llm(num_blocks=17, max_model_len=256, scheduler=name)
    users, priorities = [f"user-{i % 3}" for i in range(len(prompts))], [i % 4 for i in range(len(prompts))]
    check_golden(llm.generate(prompts, golden_params, user=users, priority=priorities), part)
    stats = llm.stats()
    assert stats.num_preemptions > 0
    assert stats.num_policy_faults == 0


@pytest.mark.parametrize("name", ["classic", *(["fcfs", "priority", "fair", "srtf"] if DEEP else [])])
def test_two_answers_to_each(make_llm, golden_prompts, golden_params, check_golden, name):
    """Greedy ones are the same, also where they are preempted; a fifth of the prompts by default."""
    part = part_of(5)
    llm = make_llm(num_blocks=12, block_size=16, max_model_len=128, scheduler=name)
    outputs = llm.generate(golden_prompts[part], msgspec.structs.replace(golden_params, n=2))
    assert [len(output.outputs) for output in outputs] == [2] * len(outputs)
    check_golden(outputs, part)
    stats = llm.stats()
    assert stats.num_preemptions > 0
    assert stats.num_policy_faults == 0


def test_without_prefix_cache(make_llm, golden_prompts, golden_params, check_golden):
    llm, part = make_llm(enable_prefix_caching=False), part_of(2)
    check_golden(llm.generate(golden_prompts[part], golden_params), part)
    assert llm.stats().prefix_hit_tokens == 0


def test_every_attention_backend(make_llm, golden_prompts, golden_params, check_golden):
    """Those that work here, each with the reference kernels, which the shared engine has not; by default each with
    other prompts, a third of them in all."""
    import torch

    from llmkit import Registry
    from llmkit.registry import detect_environment

    registry, environment = Registry.discover(), detect_environment("cuda" if torch.cuda.is_available() else "cpu")
    plugins = [registry.load_row(row) for row in registry.find("attention")]
    names = [plugin.row.name for plugin in plugins if not plugin.problems(environment)]
    assert len(names) >= 2
    for first, name in enumerate(names):
        part = part_of(3 * len(names), first)
        llm = make_llm(**{"attention.backend": name, "execution.kernels": "torch"})
        check_golden(llm.generate(golden_prompts[part], golden_params), part)
        llm.close()


def test_weights_of_4_bits_as_the_file_has_them(make_llm, golden_prompts, golden_params, check_golden):
    """What `auto` means for this file: the same numbers, so the same answers; together, and with a budget of 16, in
    which the log-probabilities are the same as well: nothing that a row meets depends on how the work is cut."""
    llm, part = make_llm(dtype="auto"), part_of(4)
    assert "int4" in [s.name for s in llm.engine.prepared.registry.selections if s.kind == "quantization"]
    params = msgspec.structs.replace(golden_params, logprobs=1)
    together = llm.generate(golden_prompts, params)
    check_golden(together)
    cut = make_llm(dtype="auto", max_num_batched_tokens=16).generate(golden_prompts[part], params)
    for one, other in zip(cut, together[part], strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        logprobs = [[entry.logprobs[0] for entry in output.outputs[0].logprobs] for output in (one, other)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=2e-5)  # they are added up over the vocabulary in torch


def test_transformers_own_code_with_paged_attention(make_llm, smollm2_folder, golden, golden_params):
    """The same model through the plugin that hosts models of transformers: a few prompts, together and in chunks, and
    half of their answers by default."""
    llm = make_llm(smollm2_folder, implementation="transformers", max_num_batched_tokens=32)
    assert "transformers" in [s.name for s in llm.engine.prepared.registry.selections if s.kind == "model"]
    few = [item for item in golden if min(item["top2_margin"]) > 1e-3][:4]
    params = msgspec.structs.replace(golden_params, max_tokens=golden_params.max_tokens // (1 if DEEP else 2))
    outputs = llm.generate([item["prompt_token_ids"] for item in few], params)
    for item, output in zip(few, outputs, strict=True):
        assert output.outputs[0].token_ids == item["output_token_ids"][: params.max_tokens]
