"""Requests that ask for an embedding, among others, with a fake model."""

from __future__ import annotations

import pytest

from llmkit.errors import InvalidRequestError
from llmkit.testing.fake_executor import fake_embedding
from llmkit.testing.scheduling import SchedulingHarness
from llmkit_schedulers.fcfs import FcfsPolicy

PROMPTS = {name: [ord(name)] * 7 + list(range(size)) for name, size in zip("abcd", (1, 5, 30, 60), strict=True)}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("settings", [{}, {"num_blocks": 20}, {"num_blocks": 20, "num_host_blocks": 40}])
def test_embeddings_beside_answers(depth, pooling, settings):
    """In chunks, twice (the second time from the prefix cache), and with preemption."""
    policy = FcfsPolicy()
    if "num_host_blocks" in settings:
        policy.preemption = "swap"
    run = SchedulingHarness(policy, max_concurrent_steps=depth, max_num_batched_tokens=16, **settings)
    for name, prompt in PROMPTS.items():
        for again in ("", "2"):
            run.add(f"embed-{name}{again}", prompt, 0, pooling=pooling)
            run.add(f"answer-{name}{again}", prompt, 12)
    run.run()
    run.check_answers()
    for name, prompt in PROMPTS.items():
        for again in ("", "2"):
            answer = run.answers[f"embed-{name}{again}", 0]
            assert (answer.finish_reason, answer.error) == ("stop", None)
            assert answer.embedding == pytest.approx(fake_embedding(prompt, pooling))


def test_a_mean_takes_nothing_from_the_prefix_cache():
    run = SchedulingHarness(FcfsPolicy())
    for number, pooling in enumerate(("last", "last", "mean")):
        run.add(str(number), [1] * 20, 0, pooling=pooling)
        run.run()
    assert [run.answers[str(i), 0].num_cached_tokens for i in range(3)] == [0, 16, 0]


def test_what_generates_has_no_embedding():
    run = SchedulingHarness(FcfsPolicy())
    with pytest.raises(InvalidRequestError, match="nothing is generated"):
        run.core.add(run_request(run, 3))


def run_request(run, max_tokens):
    from llmkit.requests.message import EngineRequest
    from llmkit.requests.sampling_params import SamplingParams

    assert not run.core.has_work()
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    return EngineRequest(
        request_id="a", prompt_token_ids=[1], sampling_params=params, max_tokens=max_tokens, pooling="last"
    )
