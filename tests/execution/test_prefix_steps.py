"""Steps in which the attention backend is told what rows share: launched one by one and from static inputs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmkit.execution.cuda.decode_graphs import Ending
from llmkit.hookspecs.attention import AttentionBatch, AttentionLayer, PrefixSharing

from .conftest import PagedAttention

PROMPT = [5, 17, 3, 3, 21, 8, 30, 11, 2, 14, 9, 1, 7]


class SharingAttention(PagedAttention):
    """Reads shared tokens from the pages of a group's first member and all others from a row's own, where it finds
    what it was told on the device."""

    def __init__(self, sharing: PrefixSharing) -> None:
        self.prefix_sharing = sharing
        self.told: list[tuple[int, ...]] = []  # of each call with prefixes, what rows share

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionBatch,
    ) -> torch.Tensor:
        prefixes = metadata.prefixes
        if prefixes is not None and layer.sliding_window is None:
            self.told.append(tuple(prefixes.shared_lens.tolist()))
            assert torch.equal(prefixes.own_lens + prefixes.shared_lens, metadata.seq_lens)
            table = torch.full_like(metadata.block_table, -1)
            page = metadata.page_size
            for row, (shared, length) in enumerate(
                zip(prefixes.shared_lens.tolist(), metadata.seq_lens.tolist(), strict=True)
            ):
                end = -(-length // page)
                table[row, shared // page : end] = metadata.block_table[row, shared // page : end]
            starts = prefixes.group_starts.tolist()
            for first, last in pairwise(starts):
                for row in prefixes.members[first:last].tolist():
                    shared = int(prefixes.shared_lens[row]) // page
                    table[row, :shared] = metadata.block_table[int(prefixes.members[first]), :shared]
            metadata = replace(metadata, block_table=table)
        return super().forward(layer, query, key, value, kv_cache, metadata)


SHARING = PrefixSharing(unit=4, least_rows=3, least_bytes=1, least_row_bytes=1)


def entered(
    driver: Callable[..., Any], *, launched: bool, windows: tuple[int | None, ...]
) -> tuple[Any, SharingAttention]:
    """A driver with a sequence in slot 6 whose prompt is in the cache, and sequences that begin with its first blocks
    and end otherwise in slots 1, 2 and 3."""
    backend = SharingAttention(SHARING)
    d = driver(windows=windows, launched=launched, backend=backend)
    d.add(6, PROMPT, logprobs=None)
    d.step({6: len(PROMPT)})
    for slot in (1, 2, 3):
        blocks = [list(group[:2]) for group in d.sequences[6].blocks]
        d.add(slot, [*PROMPT[:8], 20 + slot, slot], computed=8, blocks=blocks, logprobs=None)
    return d, backend


def check_tokens(d: Any) -> None:
    """All sequences have the tokens of a dense recomputation."""
    for sequence in d.sequences.values():
        expected = d.model.dense(sequence.tokens)[sequence.num_prompt - 1 : -1].argmax(-1)
        assert expected.tolist() == sequence.tokens[sequence.num_prompt :]


@pytest.mark.parametrize("windows", [(None, None), (6, None)])
@pytest.mark.parametrize("launched", [False, True])
def test_answers_are_the_same_and_it_is_told_of_what_is_shared(
    driver: Callable[..., Any], launched: bool, windows: tuple[int | None, ...]
) -> None:
    d, backend = entered(driver, launched=launched, windows=windows)
    d.step({6: 1, 1: 2, 2: 2, 3: 2})  # three prompts' ends beside a decode: no group
    assert not backend.told
    for _ in range(3):
        d.step(dict.fromkeys((3, 6, 1, 2), 1))
    assert set(backend.told) == {(8, 8, 8, 8)}
    told = len(backend.told)
    d.add(5, PROMPT[::-1], logprobs=None)
    d.step({6: 1, 5: len(PROMPT), 2: 1, 1: 1})
    assert set(backend.told[told:]) == {(8, 0, 8, 8)}
    d.remove(2)
    told = len(backend.told)
    d.step(dict.fromkeys((5, 6, 1), 1))  # two that share are no group
    d.step(dict.fromkeys((5, 6, 1, 3), 1))
    assert set(backend.told[told:]) == {(0, 8, 8, 8)}
    check_tokens(d)


def test_padded_rows_share_nothing(driver: Callable[..., Any]) -> None:
    d, backend = entered(driver, launched=True, windows=(None,))
    d.step({1: 2, 2: 2, 3: 2})
    graphs = d.runner._graphs
    graphs._sizes = graphs._common = (8,)
    d.step(dict.fromkeys((1, 2, 3), 1))
    assert backend.told[-1] == (8, 8, 8, 0, 0, 0, 0, 0)
    check_tokens(d)


def test_the_start_runs_such_steps_without_recording_them(
    driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest and the smallest, for their kernels; nothing is written."""
    backend = SharingAttention(SHARING)
    d = driver(windows=(None,), launched=True, backend=backend)
    graphs = d.runner._graphs
    graphs._sizes, graphs._common = (1, 2, 4, 8), (1, 4, 8)
    graphs._captures = True
    monkeypatch.setattr(graphs, "_capture", lambda _: True)
    graphs.warm_up()
    assert set(graphs._steps) == {(rows, graphs._staging.most_pages, (), Ending.DRAWN) for rows in (1, 4, 8)}
    rehearsed, run = backend.told[:3], backend.told[3:]
    assert rehearsed == [(0,) * 8, (0,) * 4, (0,)]
    assert sorted(run) == [(0,), (0,) * 8]
    assert not any(cache.any() for cache in d.runner.kv_caches)


def test_a_rehearsal_of_them_keeps_nothing(driver: Callable[..., Any]) -> None:
    """Kernels are compiled beside those of prompts, by a runner that is there for nothing else."""
    backend = SharingAttention(SHARING)
    d = driver(windows=(None,), launched=True, backend=backend, num_blocks=2)
    graphs = d.runner._graphs
    graphs._sizes, graphs._common = (1, 2, 4, 8), (1, 4, 8)
    caches = [cache.clone() for cache in d.runner.kv_caches]
    compiles = SimpleNamespace(num_kernels=1)
    d.runner.rehearse(compiles)
    assert d.model.steps == [1, 4, 8, 8, 4, 1]
    assert backend.told == [(0,) * 8, (0,) * 4, (0,)]
    assert not graphs._steps
    assert all(torch.equal(*pair) for pair in zip(caches, d.runner.kv_caches, strict=True))
    left, runner = weakref.ref(graphs), weakref.ref(d.runner)
    gc.disable()
    try:
        d.runner = graphs = None
        assert left() is runner() is None
    finally:
        gc.enable()


def test_without_kernels_to_compile_a_rehearsal_ends_soon(driver: Callable[..., Any]) -> None:
    d = driver(windows=(None,), launched=True)
    d.runner.rehearse(SimpleNamespace(num_kernels=0))
    assert d.model.steps == [1]


def test_steps_with_and_without_shared_prefixes_have_graphs_of_their_own(driver: Callable[..., Any]) -> None:
    """And a slot that another sequence takes over is looked at again."""
    d, backend = entered(driver, launched=True, windows=(None,))
    d.step({1: 2, 2: 2, 3: 2})
    d.step(dict.fromkeys((1, 2, 3), 1))
    d.remove(3)
    d.add(3, PROMPT[::-1], logprobs=None)
    d.step({3: len(PROMPT)})
    told = len(backend.told)
    d.step(dict.fromkeys((1, 2, 3), 1))
    assert len(backend.told) == told
    assert {sharing for _, _, sharing, _ in d.runner._graphs._steps} == {(), (0,)}
    check_tokens(d)
