"""Batches for `attention.py`: the cases that are timed, random shapes, and what must come out."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from llmkit.hookspecs.attention import AttentionBatch, AttentionLayer
from llmkit.testing.paged_attention import prefixes_in
from llmkit_attention.triton_backend import TritonAttention

DEVICE = "cuda"
LAYER = AttentionLayer(0, 32, 8, 128, 128**-0.5)
RELATIVE_ERROR = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@dataclass(frozen=True)
class Case:
    """lengths: tokens of each row in the cache with the new ones; new: how many of them are new. shared: () or, of each
    row, (a row before it or itself, with how many tokens of that one it begins)."""

    lengths: tuple[int, ...]
    new: tuple[int, ...]
    page_size: int = 16
    shared: tuple[tuple[int, int], ...] = ()


CASES = {
    "decode 64 x 1024": Case((1024,) * 64, (1,) * 64),
    "decode 1 x 4096": Case((4096,), (1,)),
    "decode 256 x 512": Case((512,) * 256, (1,) * 256),
    "prefill 8 x 2048": Case((2048,) * 8, (2048,) * 8),
    "mixed": Case((3000, 700, *(900,) * 62), (1500, 700, *(1,) * 62)),
    # Not in the comparison of libraries: one long sequence, a chunk over a long context, lengths far apart.
    "decode 1 x 65536": Case((65536,), (1,)),
    "chunk 64 over 16384": Case((16384,), (64,)),
    "decode uneven": Case((32768, *(700,) * 127), (1,) * 128),
    "decode 64, page 128": Case((1024,) * 64, (1,) * 64, 128),
    "prefill 8, page 128": Case((2048,) * 8, (2048,) * 8, 128),
    "64 share 2048 of 2112": Case((2112,) * 64, (1,) * 64, shared=((0, 2048),) * 64),
    "16 share 8192 of 8256": Case((8256,) * 16, (1,) * 16, shared=((0, 8192),) * 16),
    "256 share 512 of 768": Case((768,) * 256, (1,) * 256, shared=((0, 512),) * 256),
    "8 x 32 share 2048": Case((2112,) * 256, (1,) * 256, shared=tuple((r // 32 * 32, 2048) for r in range(256))),
}


def make_batch(
    case: Case,
    layer: AttentionLayer,
    dtype: torch.dtype,
    copies: int = 1,
    seed: int = 0,
) -> Any:
    """(batch, caches, query, key, value): pages in random order, pages of nobody hold NaN; the backend is told of what
    rows share, however little."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    size = case.page_size
    counts = [-(-length // size) for length in case.lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).numpy().astype(np.int32) + 1
    table = np.full((len(counts), max(counts) + 1), 2**30, dtype=np.int32)
    slots: list[Any] = []
    taken = 0
    for row, (count, length, new) in enumerate(zip(counts, case.lengths, case.new, strict=True)):
        table[row, :count] = order[taken : taken + count]
        taken += count
        if case.shared:
            source, tokens = case.shared[row]
            table[row, : tokens // size] = table[source, : tokens // size]
        positions = np.arange(length - new, length)
        slots.append(table[row, positions // size].astype(np.int64) * size + positions % size)
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(case.new, out=starts[1:])
    lengths = np.array(case.lengths, dtype=np.int32)
    batch = AttentionBatch(
        query_start_loc=torch.from_numpy(starts).to(DEVICE),
        seq_lens=torch.from_numpy(lengths).to(DEVICE),
        block_table=torch.from_numpy(table).to(DEVICE),
        slot_mapping=torch.from_numpy(np.concatenate(slots)).to(DEVICE),
        query_start_loc_np=starts,
        seq_lens_np=lengths,
        num_rows=len(counts),
        num_tokens=int(starts[-1]),
        max_query_len=max(case.new),
        max_seq_len=max(case.lengths),
        page_size=size,
    )
    if case.shared:
        batch.prefixes = prefixes_in(batch, TritonAttention.prefix_sharing)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)

    shape = TritonAttention().kv_shape(sum(counts) + 2, size, layer.num_kv_heads, layer.head_size)
    caches = [draw(*shape) for _ in range(copies)]
    for cache in caches:
        cache[0] = float("nan")
        cache[-1] = float("nan")
        for row, length in enumerate(case.lengths):  # what is not written yet
            if length % size:
                cache[int(table[row, counts[row] - 1]), :, :, length % size :] = float("nan")
    tokens = int(starts[-1])
    merged = draw(tokens, layer.num_heads + 2 * layer.num_kv_heads, layer.head_size)
    query, key, value = merged.split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
    return batch, caches, query, key, value


def definition(layer: AttentionLayer, batch: AttentionBatch, cache: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Attention in float64 over the cache as it is, [t, num_heads, head_size]."""
    size, group = batch.page_size, layer.num_heads // layer.num_kv_heads
    output = torch.empty(query.shape, dtype=torch.float64, device=query.device)
    for row in range(batch.num_rows):
        start, stop = int(batch.query_start_loc_np[row]), int(batch.query_start_loc_np[row + 1])
        length = int(batch.seq_lens_np[row])
        pages = batch.block_table[row, : -(-length // size)].long()
        dense = cache[pages].movedim(0, 2).flatten(2, 3)[:, :, :length].double()  # [2, kv_heads, length, head_size]
        keys, values = dense.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,hnd->hqn", query[start:stop].double(), keys) * layer.scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        here = torch.arange(length - (stop - start), length, device=query.device)[:, None]
        there = torch.arange(length, device=query.device)[None]
        hidden = there > here
        if layer.sliding_window is not None:
            hidden |= there <= here - layer.sliding_window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        output[start:stop] = torch.einsum("hqn,hnd->qhd", weights, values)
    return output


@dataclass(frozen=True)
class Trial:
    """One random shape."""

    layer: AttentionLayer
    case: Case
    dtype: torch.dtype
    kv_dtype: torch.dtype
    seed: int


def random_trial(seed: int) -> Trial:
    """Every seed is a different shape; the first ones make sure that the usual ones are there."""
    draw = random.Random(seed)
    head_size = (128, 64, 96, 256, 80, 16, 40, 192, 72, 112)[seed % 10]
    kv_heads, group = draw.choice([(8, 4), (2, 8), (1, 7), (3, 3), (4, 1), (2, 2), (1, 16), (2, 5), (1, 71)])
    dtype = (torch.bfloat16, torch.float16, torch.bfloat16, torch.float32)[seed % 4]
    kv_dtype = torch.bfloat16 if seed % 13 == 12 else dtype
    window = draw.choice([None, None, draw.randint(1, 700)])
    cap = draw.choice([None, None, 5.0])
    layer = AttentionLayer(0, kv_heads * group, kv_heads, head_size, head_size**-0.5, window, cap)
    rows = [
        draw.choice([(1, draw.randint(0, 1500)), (draw.randint(2, 5), draw.randint(0, 900)),
                     (draw.randint(6, 70), draw.randint(0, 900)), (draw.randint(71, 500), draw.randint(0, 500))])
        for _ in range(draw.randint(1, 9))
    ]  # fmt: skip
    if seed % 3 == 1:
        rows = [(1, draw.randint(0, 5000)) for _ in range(draw.randint(1, 40))]
    if seed % 7 == 6:
        rows = [(draw.randint(600, 1100), 0), *rows[:3]]
    page_size = draw.choice([16, 32, 64, 128])
    case = Case(tuple(new + before for new, before in rows), tuple(new for new, _ in rows), page_size)
    return Trial(layer, case, dtype, kv_dtype, seed)


def shared_trial(seed: int) -> Trial:
    """As `random_trial`, of rows most of which begin with the tokens of others."""
    trial, draw = random_trial(seed), random.Random(-seed)
    sources = {0: 640, 1: 128, 2: 256}
    rows = [(1, length + draw.randint(0, 300)) for length in sources.values()]
    shared = [(row, 0) for row in sources]
    for _ in range(draw.randint(4, 90)):
        source = draw.choice([0, 0, 0, 1, 2, len(rows)])
        tokens = draw.choice([sources[source], 128]) if source in sources else 0
        rows.append((draw.choice([1, 1, 1, 1, 1, 3]), tokens + draw.randint(1, 200)))
        shared.append((source, tokens))
    lengths = tuple(new + before for new, before in rows)
    return replace(trial, case=Case(lengths, tuple(new for new, _ in rows), trial.case.page_size, tuple(shared)))


def timed_trials() -> list[Trial]:
    """The cases that are timed, to be checked as well; odd seeds leave a slot out."""
    return [
        Trial(LAYER, case, torch.bfloat16, torch.bfloat16, 1000 + number) for number, case in enumerate(CASES.values())
    ]


def check(trial: Trial) -> dict[str, Any]:
    """Relative error over the whole batch, or what went wrong; compares what was written to the cache exactly."""
    start = time.perf_counter()
    layer = trial.layer
    batch, (cache,), query, key, value = make_batch(trial.case, layer, trial.dtype, seed=trial.seed)
    cache = cache.to(trial.kv_dtype)
    skipped = None
    if batch.num_tokens > 3 and trial.seed % 2:
        skipped = batch.num_tokens // 2
        batch.slot_mapping[skipped] = -1
    before = cache.clone()
    backend = TritonAttention()
    plan = backend.plan(batch)
    output = backend.forward(layer, query, key, value, cache, plan)
    again = backend.forward(layer, query, key, value, cache, plan)  # as a step's second layer is launched
    written = before.clone()
    slots = batch.slot_mapping
    kept = slots >= 0
    for part, new in ((0, key), (1, value)):
        places = slots[kept]
        written[places // batch.page_size, part, :, places % batch.page_size] = new[kept].to(trial.kv_dtype)
    same = torch.equal(written.nan_to_num(nan=777.0), cache.nan_to_num(nan=777.0))
    expected = definition(layer, batch, cache, query)
    error = ((output.double() - expected).norm() / expected.norm()).item()
    repeated = torch.equal(output, again)
    ok = same and repeated and error < RELATIVE_ERROR[trial.dtype]  # NaN is not below anything
    return {
        "ok": ok,
        "error": error,
        "cache": same,
        "repeated": repeated,
        "seconds": round(time.perf_counter() - start, 1),
    }


def describe(trial: Trial) -> str:
    layer, case = trial.layer, trial.case
    return (
        f"seed {trial.seed}: heads {layer.num_heads}/{layer.num_kv_heads} size {layer.head_size} page {case.page_size} "
        f"{str(trial.dtype)[6:]}/{str(trial.kv_dtype)[6:]} window {layer.sliding_window} cap {layer.soft_cap} "
        f"new {list(case.new)[:6]} of {list(case.lengths)[:6]}"
    )
