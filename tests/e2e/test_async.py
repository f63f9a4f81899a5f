"""AsyncLLM and embeddings with the real model."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from llmkit import AsyncLLM, SamplingParams


def test_streams_at_a_time_give_the_known_answers(smollm2_gguf, settings, facts):
    known = ((facts.g1, facts.g1_ids), (facts.g2, facts.g2_ids), (facts.g3, facts.g3_ids))

    async def main():
        async with AsyncLLM(smollm2_gguf, process=False, **settings) as llm:

            async def answer(prompt, length):
                params = SamplingParams(temperature=0, max_tokens=length, output_kind="delta")
                outputs = [output.outputs[0] async for output in llm.generate(prompt, params)]
                return [token for output in outputs for token in output.token_ids], "".join(o.text for o in outputs)

            answers = await asyncio.gather(*(answer(prompt, len(ids)) for prompt, ids in known))
            assert [ids for ids, _ in answers] == [ids for _, ids in known]
            assert answers[0][1] == " H I K L P Q R S T U V Z"
            chat = [o async for o in llm.chat(facts.g4, SamplingParams(temperature=0))]
            assert chat[-1].outputs[0].token_ids == facts.g4_ids

    asyncio.run(main())


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_those_of_transformers(llm, smollm2_folder, facts, pooling):
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    prompts = [facts.g1, facts.g2]
    for prompt, output in zip(prompts, llm.embed(prompts, pooling=pooling), strict=True):
        with torch.inference_mode():
            hidden = model(torch.tensor([llm.encode(prompt)])).last_hidden_state[0].double().numpy()
        vector = hidden[-1] if pooling == "last" else hidden.mean(0)
        assert output.embedding == pytest.approx(vector / np.linalg.norm(vector), abs=1e-4)


def test_sleep_in_a_process_in_the_middle_of_an_answer(smollm2_gguf, settings, facts):
    """At each level, in the same process."""

    async def main():
        async with AsyncLLM(smollm2_gguf, **settings) as llm:
            for level in (1, 2):
                stream = llm.submit(facts.g1, SamplingParams(temperature=0, max_tokens=12, output_kind="delta"))
                await stream.first()
                await llm.sleep(level)
                assert await llm.is_sleeping()
                await llm.wake_up()
                ids = [token for output in [o async for o in stream] for token in output.outputs[0].token_ids]
                assert ids == facts.g1_ids
                assert llm.health.num_restarts == 0
                assert (await llm.kv_map()).counts()["in_use"] == 0
                assert (await llm.recent_steps())[-1].num_running == 0

    asyncio.run(main())
