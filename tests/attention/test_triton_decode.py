"""Steps of one token a row from what the projection puts out, in one launch: beside norm, rotary embedding, write and
attention by their definitions. On a GPU where there is one, and interpreted, in the process that `test_triton.py`
starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from triton_cases import DEVICE, INTERPRETED

from llmkit.hookspecs.attention import AttentionBatch, AttentionLayer, Rotation, SharedPrefixes
from llmkit.hookspecs.kernels import HeadNorms
from llmkit.testing.attention import TOLERANCE
from llmkit.testing.paged_attention import PagedPool, dense_attention
from llmkit_kernels.torch_table import TorchKernels

pytest.importorskip("triton")

# The interpreter cuts bfloat16 off instead of rounding; on a GPU, float32 has other kernels.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
USUAL = DTYPES[-1]
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() and not INTERPRETED else (9, 0)
LAYER = AttentionLayer(0, 4, 2, 64, 0.125)
LENGTHS = (1, 2, 16, 17, 64, 65, 130, 200)


def kernels(test: Any) -> Any:
    """A test that runs kernels: interpreted, or on a GPU."""
    if INTERPRETED:
        return test
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")(test))


def backend(**replaced: Any) -> Any:
    """The backend, with a small tile whose fields may be replaced; device: how large a GPU splits are made for."""
    from llmkit_attention.triton_backend import TritonAttention
    from llmkit_attention.triton_decode_launch import DecodeTile
    from llmkit_attention.triton_tiles import Device

    processors = replaced.pop("num_processors", 2)
    tile = replace(DecodeTile(64, 0, 64, least_span=64), **replaced)
    return TritonAttention(Device(processors, 2**17, CAPABILITY), choose_decode_tile=lambda *_: tile)


@dataclass
class Step:
    """A step of one token a row, with all that it reads and what must come out."""

    layer: AttentionLayer
    batch: AttentionBatch
    projected: torch.Tensor
    rotation: Rotation
    cache: torch.Tensor
    expected: torch.Tensor
    expected_cache: torch.Tensor

    def run(self, backend: Any, plan: Any = None) -> torch.Tensor | None:
        layer, size = self.layer, self.layer.head_size
        parts = self.projected.split([layer.num_heads * size, *[layer.num_kv_heads * size] * 2], dim=1)
        plan = backend.plan(self.batch) if plan is None else plan
        return backend.attend_projected(layer, *parts, self.rotation, self.cache, plan)

    def check(self, output: torch.Tensor | None) -> None:
        assert output is not None, "it was not taken"
        dtype = self.projected.dtype
        assert output.dtype == dtype
        assert output.shape == (len(self.projected), self.layer.num_heads, self.layer.head_size)
        assert (output.cpu().double() - self.expected).abs().max() < TOLERANCE[dtype]
        same = torch.equal(self.cache.isnan(), self.expected_cache.isnan())
        assert same, "something else was written, or not all"
        written = ~self.cache.isnan()
        close = TOLERANCE[dtype]
        torch.testing.assert_close(self.cache[written], self.expected_cache[written], rtol=close, atol=close)


def make_step(
    lengths: tuple[int, ...],
    layer: AttentionLayer = LAYER,
    dtype: torch.dtype = USUAL,
    page_size: int = 16,
    normed: bool = True,
    unwritten: tuple[int, ...] = (),
    seed: int = 0,
) -> Step:
    """lengths: of the rows, with the new token. unwritten: rows whose slot is negative. Unwritten cells of the cache
    are NaN, and block tables end in page numbers far outside."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    from llmkit_attention.triton_backend import TritonAttention

    heads, kv_heads, size = layer.num_heads, layer.num_kv_heads, layer.head_size
    pool = PagedPool(sum(-(-length // page_size) for length in lengths) + 2, page_size, seed)
    cache = pool.caches(TritonAttention(), [layer], dtype, fill=float("nan"))[0]
    past = []
    for row, length in enumerate(lengths):
        slots = pool.step([(row, length - 1)]).slot_mapping
        old = draw(2, length - 1, kv_heads, size)
        for part in (0, 1):
            cache[slots // page_size, part, :, slots % page_size] = old[part]
        past.append(old)
    batch = pool.step([(row, 1) for row in range(len(lengths))])
    projected = draw(len(lengths), (heads + 2 * kv_heads) * size)
    norms = HeadNorms(*(1 + draw(size) / 4 for _ in range(2)), 1e-6) if normed else None
    angles = torch.rand(max(lengths), size // 2, generator=generator) * 6
    rotation = Rotation(batch.seq_lens.long() - 1, torch.cat((angles.cos(), angles.sin()), 1), norms)
    query, key, value = projected.clone().split([heads * size, kv_heads * size, kv_heads * size], dim=1)
    query, key = turned(query, norms and norms.query, rotation, size), turned(key, norms and norms.key, rotation, size)
    key, value = (x.reshape(len(lengths), kv_heads, size) for x in (key, value))
    expected, expected_cache = [], cache.clone()
    for row, old in enumerate(past):
        new = torch.stack((key[row], value[row]))[:, None]
        expected.append(dense_attention(layer, query[row : row + 1], *torch.cat((old, new), 1)))
        slot = int(batch.slot_mapping[row])
        if row in unwritten:
            batch.slot_mapping[row] = -1
        else:
            expected_cache[slot // page_size, :, :, slot % page_size] = torch.stack((key[row], value[row]))
    on_device = Rotation(*(x.to(DEVICE) for x in (rotation.positions, rotation.cos_sin)), norms and _moved(norms))
    return Step(
        layer, moved(batch), projected.to(DEVICE), on_device, cache.to(DEVICE), torch.cat(expected),
        expected_cache.to(DEVICE),
    )  # fmt: skip


def turned(heads: torch.Tensor, weight: torch.Tensor | None, rotation: Rotation, size: int) -> torch.Tensor:
    """heads [t, h * size] normed and rotated by the reference: [t, h, size]."""
    heads = heads.reshape(len(heads), -1, size)
    if weight is not None:
        assert rotation.norms is not None
        heads = TorchKernels().rms_norm(heads, weight, rotation.norms.eps)
    flat = heads.reshape(len(heads), -1).clone()
    TorchKernels().rotary(rotation.positions, flat, flat[:, :0], rotation.cos_sin, size)
    return flat.view(heads.shape)


def _moved(norms: HeadNorms) -> HeadNorms:
    return HeadNorms(norms.query.to(DEVICE), norms.key.to(DEVICE), norms.eps)


def moved(batch: AttentionBatch) -> AttentionBatch:
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    return replace(batch, **{name: getattr(batch, name).to(DEVICE) for name in names})


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [{}, {"first": 128, "second": 64}, {"block_n": 32}])
def test_rows_of_many_lengths(dtype: torch.dtype, tile: dict[str, int]) -> None:
    step = make_step(LENGTHS, dtype=dtype, unwritten=(0, 3))
    step.check(step.run(backend(**tile)))


@kernels
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (8, 2), (7, 1), (6, 2), (15, 3)])
@pytest.mark.parametrize("size", [32, 128])
def test_heads(heads: int, kv_heads: int, size: int, normed: bool) -> None:
    layer = AttentionLayer(0, heads, kv_heads, size, size**-0.5)
    step = make_step((70, 33), layer, normed=normed, seed=heads)
    step.check(step.run(backend()))


@kernels
@pytest.mark.parametrize(("window", "cap"), [(1, None), (50, None), (128, 3.0), (300, None), (None, 2.0)])
@pytest.mark.parametrize("num_processors", [2, 40])
def test_windows_and_caps(window: int | None, cap: float | None, num_processors: int) -> None:
    layer = replace(LAYER, sliding_window=window, soft_cap=cap)
    step = make_step(LENGTHS, layer, page_size=32)
    step.check(step.run(backend(num_processors=num_processors)))


@kernels
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("tile", [{}, {"first": 128, "second": 64, "least_span": 192}])
def test_long_rows_are_split_and_combined(page_size: int, tile: dict[str, int]) -> None:
    """Beside rows that have one split; more splits than are combined at once; counters are left as they were."""
    attention = backend(num_processors=80, **tile)
    step = make_step((700, 1, 64, 193, 1100), page_size=page_size, unwritten=(2,))
    for _ in range(3):
        step.check(step.run(attention))
    counters = attention._decode_memory.counters(1, step.cache.device)
    assert not counters.any()


@kernels
def test_steps_planned_once_follow_the_lengths() -> None:
    """Planned for long rows, with splits; run for shorter ones, which need none or fewer."""
    attention = backend(num_processors=80)
    steps = [make_step(lengths, seed=3) for lengths in ((40, 3), (1, 700), (520, 65))]
    recorded = make_step((1024, 1024))
    plan = attention.plan(recorded.batch)
    graph, output = None, None
    for step in (*steps, steps[0]):
        follow(recorded, step)
        if INTERPRETED or graph is None:
            output = recorded.run(attention, plan)
        if not INTERPRETED and graph is None:
            follow(recorded, step)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = recorded.run(attention, plan)
        if graph is not None:
            graph.replay()
        replace(step, cache=recorded.cache[: len(step.cache)]).check(output)


def follow(recorded: Step, step: Step) -> None:
    """Bring a step's values into the tensors of the recorded one."""
    assert recorded.rotation.norms is not None
    assert step.rotation.norms is not None
    recorded.batch.block_table.fill_(2**30)
    for target, source in (
        (recorded.batch.seq_lens, step.batch.seq_lens),
        (recorded.batch.slot_mapping, step.batch.slot_mapping),
        (recorded.batch.block_table[:, : step.batch.block_table.shape[1]], step.batch.block_table),
        (recorded.projected, step.projected),
        (recorded.rotation.positions, step.rotation.positions),
        (recorded.rotation.cos_sin[: len(step.rotation.cos_sin)], step.rotation.cos_sin),
        (recorded.rotation.norms.query, step.rotation.norms.query),
        (recorded.rotation.norms.key, step.rotation.norms.key),
        (recorded.cache[: len(step.cache)], step.cache),  # which is of another size
    ):
        target.copy_(source)


@kernels
def test_more_tokens_than_the_batch_has() -> None:
    """Padding behind it: zeros."""
    step = make_step((20, 90))
    step.projected = torch.cat((step.projected, step.projected[:1] + torch.nan))
    step.expected = torch.cat((step.expected, torch.zeros_like(step.expected[:1])))
    step.check(step.run(backend()))


@kernels
def test_what_it_does_not_take() -> None:
    from llmkit_attention.triton_backend import TritonAttention
    from llmkit_attention.triton_tiles import Device

    attention, step = backend(), make_step((20, 90))
    wide = torch.zeros(2, 36 * 64, dtype=USUAL, device=DEVICE)
    assert step.batch.prefixes is None
    shared = SharedPrefixes(*[step.batch.seq_lens] * 4, step.batch.seq_lens_np)
    for what, other in {
        "half of each head is rotated": replace(
            step, rotation=replace(step.rotation, cos_sin=step.rotation.cos_sin[:, :32].contiguous())
        ),
        "many heads of a KV head": replace(step, layer=replace(LAYER, num_heads=32), projected=wide),
        "another type": replace(step, projected=step.projected.double()),
        "a cache of another type": replace(step, cache=step.cache.double()),
        "rows of several tokens": replace(step, batch=replace(step.batch, num_tokens=3, max_query_len=2)),
        "rows share keys": replace(step, batch=replace(step.batch, prefixes=shared)),
    }.items():
        before = other.cache.clone()
        assert other.run(attention) is None, what
        assert torch.equal(other.cache.nan_to_num(7.0), before.nan_to_num(7.0)), what
    usual = TritonAttention(Device(100, 2**17, CAPABILITY))
    assert (make_step((3,) * 4).run(usual) is None) == (CAPABILITY[0] != 9)
    assert make_step((3,) * 40).run(usual) is None, "many rows"
    assert make_step((2000,)).run(usual) is None, "a long row"
    other = TritonAttention(Device(100, 2**17, (8, 0)))
    assert make_step((3,)).run(other) is None, "a GPU on which it was not measured"
