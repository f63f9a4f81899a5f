"""Embeddings of a tiny model of random weights."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from llmkit import (
    LLM,
    AsyncLLM,
    EngineClosedError,
    InvalidRequestError,
    RequestFailedError,
    RequestOptions,
    SamplingParams,
)
from llmkit.frontend.embedding import EmbeddingParams
from llmkit.requests.output import RequestOutput

SETTINGS = {
    "load_format": "dummy",
    "dtype": "float32",
    "num_blocks": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "num_threads": 1,
    "attention.backend": "torch",
    "execution.kernels": "torch",
    "overrides": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": 5,
    },
}
PROMPTS = [[7], [1, 2, 3], list(range(60))]


@pytest.fixture(scope="module")
def llm():
    with LLM(**SETTINGS) as shared:
        yield shared


@pytest.fixture(scope="module")
def states(llm):
    """Hidden states of each prompt, from one forward pass of the model alone."""
    import torch

    from llmkit.layers.context import ForwardContext
    from llmkit.testing.paged_attention import PagedPool

    built = llm.engine.core.executor._worker._built
    shape = built.groups[0].spec
    found = []
    for prompt in PROMPTS:
        pool = PagedPool(64, 4, seed=3)
        sizes = [pool_shape(built.backend, shape)] * 2
        caches = [torch.zeros(size) for size in sizes]
        rows = [(0, len(prompt))]
        context = ForwardContext(built.backend, [built.backend.plan(pool.step(rows, "cpu"))] * 2, caches, None)
        with torch.inference_mode():
            found.append(built.model.forward(torch.tensor(prompt), pool.positions(rows), context).double().numpy())
    return found


def pool_shape(backend, spec):
    return backend.kv_shape(64, 4, spec.num_kv_heads, spec.head_size)


def normalised(vector):
    return vector / np.linalg.norm(vector)


def test_last_and_mean_are_those_of_the_model_alone(llm, states):
    """Twice: the second time with the prefix cache."""
    for _ in range(2):
        for prompt, hidden in zip(PROMPTS, states, strict=True):
            (last,) = llm.embed(prompt)
            (mean,) = llm.embed(prompt, pooling="mean")
            assert last.embedding == pytest.approx(normalised(hidden[-1]), abs=1e-5)
            assert mean.embedding == pytest.approx(normalised(hidden.mean(0)), abs=1e-5)
            assert (last.num_prompt_tokens, mean.num_cached_tokens) == (len(prompt), 0)
    assert llm.embed(PROMPTS[2])[0].num_cached_tokens == 48


def test_raw_and_shorter_embeddings(llm, states):
    raw = llm.embed(PROMPTS, normalize=False)
    assert [len(output.embedding) for output in raw] == [32] * 3
    assert raw[1].embedding == pytest.approx(states[1][-1], abs=1e-5)
    (short,) = llm.embed(PROMPTS[1], dimensions=8)
    assert short.embedding == pytest.approx(normalised(states[1][-1][:8]), abs=1e-5)


def test_beside_generation(states):
    async def main():
        async with AsyncLLM(process=False, **SETTINGS) as llm:
            params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1, output_kind="final_only")

            async def answer(prompt):
                return [output async for output in llm.generate(prompt, params)][-1].outputs[0].token_ids

            alone = [await answer(prompt) for prompt in PROMPTS]
            work = [*(answer(prompt) for prompt in PROMPTS), *(llm.embed(p, pooling="mean") for p in PROMPTS)]
            together = await asyncio.gather(*work)
            assert together[:3] == alone
            for output, hidden in zip(together[3:], states, strict=True):
                assert output.embedding == pytest.approx(normalised(hidden.mean(0)), abs=1e-5)
            stats = await llm.stats()
            assert (stats.num_unfinished, stats.num_free_blocks) == (0, stats.num_blocks)
            refused = llm.embed([1], options=RequestOptions(kv_transfer_params={"a": 1}))
            with pytest.raises(InvalidRequestError):
                await refused
        with pytest.raises(EngineClosedError):
            await llm.embed([1])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt", "arguments", "param"),
    [
        ([1], {"pooling": "first"}, "pooling"),
        ([1], {"normalize": 1}, "normalize"),
        ([1], {"dimensions": 0}, "dimensions"),
        ([1], {"dimensions": 33}, "dimensions"),
        ([1], {"dimensions": True}, "dimensions"),
        ([], {}, "prompt"),
        ([[1], [999]], {}, "prompt"),
        ([[1] * 300], {}, "prompt"),
    ],
)
def test_refused(llm, prompt, arguments, param):
    with pytest.raises(InvalidRequestError) as raised:
        llm.embed(prompt, **arguments)
    assert raised.value.param == param


def test_what_failed_has_no_embedding():
    answer = RequestOutput("a", None, [1], [], True, error="the device is lost")
    with pytest.raises(RequestFailedError, match="the device is lost"):
        EmbeddingParams().output(answer)


def test_a_vector_of_length_zero_stays_as_it_is():
    answer = RequestOutput("a", None, [1], [], True, embedding=[0.0, 0.0])
    assert EmbeddingParams().output(answer).embedding == [0.0, 0.0]
