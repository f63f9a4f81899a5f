from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmkit.sampling import truncation
from llmkit.sampling.ordering import order_keys, ranks_of, top_indices
from llmkit.sampling.truncation import Truncation, candidates, mask_min_p


def limits(top_k: list[int], top_p: list[float], min_p: list[float]) -> Truncation:
    return Truncation(
        torch.tensor(top_k),
        torch.tensor(top_p, dtype=torch.float64),
        torch.tensor([math.log(p) if p else -math.inf for p in min_p]),
        max(top_k),
    )


def kept(scores: torch.Tensor, top_k: int, top_p: float = 1.0, min_p: float = 0.0) -> list[set[int]]:
    n, v = scores.shape
    ids, values = candidates(scores, limits([min(top_k, v) or v] * n, [top_p] * n, [min_p] * n))
    return [{int(i) for i, x in zip(*row, strict=True) if x > -math.inf} for row in zip(ids, values, strict=True)]


def reference(scores: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definition, token by token, in Python floats."""
    best = max(scores)
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    order = [i for i in order if min_p == 0 or scores[i] - best >= math.log(min_p)] or order[:1]
    order = order[: top_k or len(order)]
    weights = [math.exp(scores[i] - best) for i in order]
    if top_p >= 1:
        return set(order)
    result, before = set(), 0.0
    for i, weight in zip(order, weights, strict=True):
        if result and before >= top_p * sum(weights):
            break
        result.add(i)
        before += weight
    return result


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=30),
    st.integers(0, 35),
    st.sampled_from([0.05, 0.33, 0.71, 0.97, 1.0]),
    st.sampled_from([0.0, 0.03, 0.4, 1.0]),
)
def test_against_the_definition(tenths, top_k, top_p, min_p):
    scores = torch.tensor([tenths], dtype=torch.float32) * 0.137
    expected = reference(scores[0].tolist(), top_k if top_k < len(tenths) else 0, top_p, min_p)
    assert kept(scores, top_k, top_p, min_p) == [expected]


def test_ties_go_to_the_lower_index_whatever_k_is():
    scores = torch.tensor([[0.0, 1.0, 1.0, 1.0, -0.0]])
    assert kept(scores, 2) == [{1, 2}]
    assert kept(scores, 4) == [{0, 1, 2, 3}]
    assert top_indices(scores, 5).tolist() == [[1, 2, 3, 0, 4]]


def test_neighbours_with_other_limits_change_nothing():
    scores = torch.randn(3, 200, generator=torch.Generator().manual_seed(1))
    together_ids, together = candidates(scores, limits([200, 5, 60], [0.5, 1.0, 0.9], [0.0, 0.1, 0.0]))
    for row, (k, p, m) in enumerate(((200, 0.5, 0.0), (5, 1.0, 0.1), (60, 0.9, 0.0))):
        ids, values = candidates(scores[row : row + 1], limits([k], [p], [m]))
        n = int((values > -math.inf).sum())
        assert ids[0, :n].tolist() == together_ids[row, :n].tolist()
        assert int((together[row] > -math.inf).sum()) == n


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_narrow_search_gives_what_a_full_sort_gives(monkeypatch, spread):
    scores = torch.randn(4, 3000, generator=torch.Generator().manual_seed(2)) * spread
    for top_p in (0.2, 0.9, 0.999):
        narrow = kept(scores, 0, top_p)
        monkeypatch.setattr(truncation, "_FIRST_WIDTHS", ())
        assert kept(scores, 0, top_p) == narrow
        monkeypatch.undo()


def test_a_single_entry_stays_when_the_limits_are_the_tightest():
    scores = torch.tensor([[3.0, 3.0, 2.0]])
    assert kept(scores, 0, 1e-9) == [{0}]
    assert kept(scores, 1) == [{0}]
    assert kept(scores, 0, 1.0, 1.0) == [{0, 1}]


def test_masking_by_min_p():
    scores = torch.tensor([[0.0, math.log(0.5), math.log(0.09), -math.inf]])
    mask_min_p(scores, torch.tensor([math.log(0.1)]))
    assert (scores > -math.inf).tolist() == [[True, True, False, False]]


def test_keys_order_like_floats():
    values = torch.tensor([[-math.inf, -1e30, -1.0, -1e-40, -0.0, 0.0, 1e-40, 2.0, 1e30, math.inf]])
    keys = order_keys(values)[0]
    assert keys.sort().indices.tolist() == [0, 1, 2, 3, 5, 4, 6, 7, 8, 9]  # among equals the lower index is larger


NUMBERS = st.sampled_from([-math.inf, -1.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, 2.0, math.inf])


@settings(deadline=None)
@given(st.lists(st.lists(NUMBERS, min_size=9, max_size=9), min_size=1, max_size=4), st.booleans())
def test_the_first_ones_and_the_ranks_are_those_of_the_keys(rows, with_nan):
    """Whatever is equal at the border of what is asked for, and beside rows where nothing is."""
    logits = torch.tensor([*rows, [float(i) for i in range(9)]])
    if with_nan:
        logits[0, 4] = math.nan
    in_order = order_keys(logits).argsort(dim=-1, descending=True)
    for k in range(1, 10):
        assert torch.equal(top_indices(logits, k), in_order[:, :k])
    for rank, tokens in enumerate(in_order[int(with_nan) :].T, start=1):
        assert ranks_of(logits[int(with_nan) :], tokens).tolist() == [rank] * len(tokens)


def test_rank_agrees_with_the_order():
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]]).expand(4, -1)
    assert ranks_of(logits, torch.arange(4)).tolist() == [3, 1, 2, 4]
