from __future__ import annotations

import pytest

from llmkit.requests.message import EngineRequest, PriorOutput
from llmkit.requests.request import RequestGroup, RequestStatus, sequence_seed
from llmkit.requests.sampling_params import SamplingParams


def group(**fields):
    params = SamplingParams(n=3, seed=7, min_tokens=2)
    values = {"request_id": "r", "prompt_token_ids": [1, 2, 3], "sampling_params": params, "max_tokens": 16}
    return RequestGroup(EngineRequest(**values | fields), first_number=5, stop_at=19)


def test_the_first_sequence_leads_and_the_others_wait_for_it():
    request = group()
    assert [s.sequence_id for s in request.sequences] == ["r/0", "r/1", "r/2"]
    assert [s.sequence_number for s in request.sequences] == [5, 6, 7]
    assert request.leader is request.sequences[0]
    assert request.leader.status is RequestStatus.WAITING
    assert {s.status for s in request.pending} == {RequestStatus.PENDING}


def test_seeds_of_a_request_are_distinct_and_fixed():
    seeds = [sequence_seed(7, index) for index in range(1000)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds[1] == 3595544800446187243
    # Neighbouring seeds of a user must not share sequences.
    assert len({sequence_seed(seed, index) for seed in range(100) for index in range(100)}) == 10_000
    assert sequence_seed(-(2**63), 1) != sequence_seed(-(2**63) + 1, 1)


def test_a_view_is_live_and_read_only():
    request = group(user="u", priority=3, arrival_time=1.5).leader
    view = request.view
    assert (view.request_id, view.user, view.priority, view.arrival_time) == ("r", "u", 3, 1.5)
    assert (view.num_prompt_tokens, view.num_tokens, view.num_output_tokens, view.max_tokens) == (3, 3, 0, 16)
    request.token_ids.append(9)
    request.num_computed_tokens = 3
    assert (view.num_tokens, view.num_output_tokens, view.num_computed_tokens) == (4, 1, 3)
    with pytest.raises(AttributeError):
        view.priority = 0
    with pytest.raises(AttributeError):
        view.extra = 0
    assert len({view, request.view}) == 1


def test_a_resumed_request_starts_with_its_earlier_tokens():
    params = SamplingParams(seed=0)
    resumed = EngineRequest(
        request_id="r", prompt_token_ids=[1], sampling_params=params, max_tokens=4, prior_outputs=(PriorOutput((8, 9)),)
    )
    request = RequestGroup(resumed, 0, 5).leader
    assert request.token_ids == [1, 8, 9]
    assert (request.num_prompt_tokens, request.num_output_tokens) == (1, 2)
