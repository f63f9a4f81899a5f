"""Embedding and head, tied and not, on any number of workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from llmkit.errors import ModelError
from llmkit.layers.context import ModelContext, ParallelLayout
from llmkit.layers.embedding import LMHead, VocabEmbedding

Make = Callable[..., ModelContext]


def test_tied_head_uses_the_embedding_itself(make_context: Make) -> None:
    context = make_context()
    embedding = VocabEmbedding(context, 10, 4)
    head = LMHead(context, 10, 4, embedding)
    weight, x = torch.randn(10, 4), torch.randn(3, 4)
    dict(embedding.weight_slots("embed"))["embed.weight"].load(weight)
    assert dict(head.weight_slots("lm_head")) == {}
    assert head.weight is embedding.weight
    assert head.parameter_bytes() == 0
    torch.testing.assert_close(head(x), x @ weight.T)
    torch.testing.assert_close(embedding(torch.tensor([9, 0, 9])), weight[[9, 0, 9]])


def test_logits_are_float32_whatever_the_type(make_context: Make) -> None:
    head = LMHead(make_context(dtype=torch.bfloat16), 10, 4)
    dict(head.weight_slots("lm_head"))["lm_head.weight"].load(torch.randn(10, 4))
    x = torch.randn(2, 4).bfloat16()
    assert head(x).dtype is torch.float32
    assert head.scores(x).dtype is torch.bfloat16
    assert torch.equal(head.scores(x).float(), head(x))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_vocabulary_dealt_out_gives_the_same(make_context: Make, count: int) -> None:
    weight, x, ids = torch.randn(10, 4), torch.randn(3, 4), torch.tensor([0, 4, 5, 9])
    vectors, logits = torch.zeros(4, 4), []
    for rank in range(count):
        parallel = ParallelLayout(rank, count, all_reduce=lambda v: v, all_gather=lambda v: v)
        context = make_context(parallel=parallel)
        embedding = VocabEmbedding(context, 10, 4)
        dict(embedding.weight_slots("embed"))["embed.weight"].load(weight)
        vectors += embedding(ids)
        logits.append(LMHead(context, 10, 4, embedding)(x))
    torch.testing.assert_close(vectors, weight[ids])
    torch.testing.assert_close(torch.cat(logits, dim=-1), x @ weight.T)


def test_a_vocabulary_that_does_not_divide_is_refused(make_context: Make) -> None:
    with pytest.raises(ModelError, match="vocabulary of 10"):
        VocabEmbedding(make_context(parallel=ParallelLayout(0, 3)), 10, 4)
