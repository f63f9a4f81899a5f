"""The `triton` backend where it can run: interpreted, in a process of its own, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from llmkit.hookspecs.attention import AttentionBatch, AttentionLayer
from llmkit.testing.attention import SHAPES, TOLERANCE, AttentionTrial, check_attention_backend, single_threaded

pytest.importorskip("triton")

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.long
def test_under_the_interpreter(interpreted: Callable[..., list[str]]) -> None:
    """The conformance suite, and all of `test_triton_interpreted.py` and `test_triton_decode.py`."""
    paths = (Path(__file__).with_name(f"test_triton_{name}.py") for name in ("interpreted", "decode"))
    passed = interpreted("--llmkit-conformance=attention:triton", *paths)
    assert len(passed) >= 118, "tests of the kernels were skipped"


def follow(recorded: AttentionBatch, other: AttentionBatch) -> None:
    """Bring the values of `other` into the tensors of `recorded`."""
    assert recorded.prefixes is not None
    for name in ("seq_lens", "slot_mapping"):
        getattr(recorded, name).copy_(getattr(other, name))
    recorded.block_table.zero_()
    width = min(recorded.block_table.shape[1], other.block_table.shape[1])
    recorded.block_table[:, :width].copy_(other.block_table[:, :width])
    if other.prefixes is None:
        recorded.prefixes.group_starts.zero_()
        recorded.prefixes.shared_lens.zero_()
        recorded.prefixes.own_lens.copy_(other.seq_lens)
        return
    for name in ("group_starts", "members", "shared_lens", "own_lens"):
        getattr(recorded.prefixes, name).copy_(getattr(other.prefixes, name))


class TestOnAGPU:
    pytestmark = on_gpu

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        """Of the definition, on the host: sixteen threads that wait for one another took most of the time."""
        with single_threaded():
            yield

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_the_conformance_suite_passes(self, dtype: torch.dtype) -> None:
        from llmkit_attention.triton_backend import TritonAttention

        capability = torch.cuda.get_device_capability()
        assert check_attention_backend(
            TritonAttention(), device="cuda", dtypes=(dtype,), compute_capability=capability
        ) == len(SHAPES)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("head_size", [80, 128, 256])
    def test_long_contexts_and_large_heads(self, head_size: int, dtype: torch.dtype) -> None:
        from llmkit_attention.triton_backend import TritonAttention

        layer = AttentionLayer(0, 8, 2, head_size, head_size**-0.5)
        run = AttentionTrial(TritonAttention(), layer, 16, dtype, dtype, "cuda")
        for rows in (((0, 500),), ((0, 1), (1, 3)), ((1, 1), (0, 1)), ((0, 60), (1, 1))):
            assert run.step(rows) < TOLERANCE[dtype]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("page_size", [16, 128])
    def test_rows_that_share_prefixes(self, dtype: torch.dtype, page_size: int) -> None:
        """Two groups, one of more rows than a tile has, beside rows that share nothing and one of several tokens."""
        from llmkit_attention.triton_backend import TritonAttention

        layer = AttentionLayer(0, 8, 2, 128, 128**-0.5)
        run = AttentionTrial(TritonAttention(), layer, page_size, dtype, dtype, "cuda", capacity=9000)
        run.fill(0, 1500)
        run.fill(1, 140)
        run.fork(0, range(2, 40), 1280)
        run.fork(1, range(40, 44), 128)
        rows = [(sequence, 1) for sequence in (*range(20), *range(41, 44), *range(20, 40))]
        for step in (rows, [*rows[:30], (50, 3), *rows[30:]], rows[::-1]):
            assert run.step(step) < TOLERANCE[dtype]

    def test_a_captured_step_follows_what_rows_share(self) -> None:
        """Captured while all rows share much, replayed for two groups and for nothing shared."""
        from llmkit_attention.triton_backend import TritonAttention

        layer, backend = AttentionLayer(0, 8, 2, 64, 0.125), TritonAttention()
        run = AttentionTrial(backend, layer, 16, torch.float32, torch.float32, "cuda", capacity=4000)
        run.fill(0, 1000)
        run.fork(0, range(1, 5), 896)
        run.fork(0, range(5, 10), 256)
        first = run.batch([(sequence, 1) for sequence in (0, 1, 2, 3, 4) * 2])
        batches = [deepcopy(first), run.batch([(sequence, 1) for sequence in range(10)])]
        batches.append(replace(batches[1], prefixes=None))
        query, key, value = (torch.randn(10, heads, 64, device="cuda") for heads in (8, 2, 2))
        plan = backend.plan(first)
        backend.forward(layer, query, key, value, run.cache, plan)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = backend.forward(layer, query, key, value, run.cache, plan)
        for batch in batches:
            expected = backend.forward(layer, query, key, value, run.cache, backend.plan(replace(batch, prefixes=None)))
            follow(first, batch)
            output.fill_(torch.nan)
            graph.replay()
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("head_size", [64, 80, 128, 256])
    def test_an_8_bit_cache(self, head_size: int, dtype: torch.dtype) -> None:
        """Decodes, chunks that fit a small tile, prompts, split rows; numbers too large for the cache."""
        from llmkit_attention.triton_backend import TritonAttention

        layer = AttentionLayer(0, 8, 2, head_size, head_size**-0.5)
        run = AttentionTrial(TritonAttention(), layer, 16, dtype, torch.float8_e4m3fn, "cuda")
        for rows in (((0, 500), (2, 9)), ((0, 1), (1, 3), (2, 1)), ((1, 1), (0, 1)), ((0, 60), (1, 1))):
            assert run.step(rows) < TOLERANCE[dtype]
        query, key = torch.ones(1, 8, head_size), torch.full((1, 2, head_size), -1e4)
        given = [x.to("cuda", dtype) for x in (query, key, -key)]
        output = run.backend.forward(layer, *given, run.cache, run.backend.plan(run.pool.step([(5, 1)], "cuda")))
        assert (output == 448).all()

    def test_a_captured_step_follows_the_lengths_on_the_device(self) -> None:
        """The host's lengths shape the grid; what is attended to is on the device, and may change between replays."""
        from llmkit_attention.triton_backend import TritonAttention

        layer, backend = AttentionLayer(0, 8, 2, 64, 0.125), TritonAttention()
        run = AttentionTrial(backend, layer, 16, torch.float32, torch.float32, "cuda")
        run.step([(0, 300), (1, 20)])
        batch = run.pool.step([(0, 1), (1, 1)], "cuda")
        query, key, value = (torch.randn(2, heads, 64, device="cuda") for heads in (8, 2, 2))
        expected = backend.forward(layer, query, key, value, run.cache, backend.plan(batch))
        for longest in (30, 4000):  # planned without splits, and with more than are needed
            lengths = np.array([longest, 2], dtype=np.int32)
            plan = backend.plan(replace(batch, seq_lens_np=lengths))
            backend.forward(layer, query, key, value, run.cache, plan)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = backend.forward(layer, query, key, value, run.cache, plan)
            output.fill_(torch.nan)
            graph.replay()
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
