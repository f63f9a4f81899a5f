"""What an attention backend claims to take, and random layers and loads to try it with."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from llmkit.hookspecs.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    AttentionQuery,
    Rotation,
    Support,
)
from llmkit.hookspecs.kernels import HeadNorms
from llmkit.testing.attention import TOLERANCE, AttentionTrial, split_heads

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels in Triton are interpreted, thousands of times slower: then layers and loads are small."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODEL_DTYPES = (*DTYPES * 3, torch.float64, torch.float8_e4m3fn)
KV_DTYPES = (*DTYPES * 3, torch.float64, torch.float8_e4m3fn, torch.int8)
HEAD_SIZES = (16, 32, 64, 128, 24, 48, 72, 80, 96, 112, 192, 256, 1, 7, 288, 512)
HEADS = ((4, 2), (2, 2), (1, 1), (6, 2), (8, 1), (9, 3), (7, 1), (5, 5), (16, 1), (71, 1), (5, 2))  # of queries, of KV
PLAIN_HEADS = ((4, 1),) if INTERPRETED else ((4, 2), (4, 4), (4, 1))

Rows = tuple[tuple[int, int], ...]
"""(sequence, new tokens) of the rows of a step."""


@dataclass(frozen=True)
class Claims:
    """A backend on a device. Types are (of the model, of the KV cache)."""

    backend: AttentionBackend
    device: str
    compute_capability: tuple[int, int] | None

    def support(self, layer: AttentionLayer, dtype: torch.dtype, kv_dtype: torch.dtype) -> Support:
        """The backend's own answer for this device."""
        return self.backend.support(
            AttentionQuery(
                device_type=self.device,
                compute_capability=self.compute_capability,
                dtype=dtype,
                kv_dtype=kv_dtype,
                num_heads=layer.num_heads,
                num_kv_heads=layer.num_kv_heads,
                head_size=layer.head_size,
                sliding_window=layer.sliding_window,
                soft_cap=layer.soft_cap,
            )
        )

    def takes(self, layer: AttentionLayer, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
        return not self.support(layer, dtype, kv_dtype).reasons

    def dtype_of(self, layer: AttentionLayer) -> torch.dtype | None:
        """The most exact type in which it takes this layer with a cache of the same type."""
        return next((dtype for dtype in DTYPES if self.takes(layer, dtype, dtype)), None)

    def layer(self, window: int | None = None, cap: float | None = None) -> AttentionLayer | None:
        """A small layer that it takes in some type, None if there is none with this window and cap."""
        plain = (
            AttentionLayer(0, heads, kv_heads, size, size**-0.5, window, cap)
            for size in HEAD_SIZES
            for heads, kv_heads in PLAIN_HEADS
        )
        return next((layer for layer in plain if self.dtype_of(layer)), None)

    def trial(self, layer: AttentionLayer, page_size: int | None = None, capacity: int = 1200) -> AttentionTrial:
        """The layer in the most exact type that it takes it in; pages of the first size if not said."""
        dtype = self.dtype_of(layer)
        assert dtype is not None
        size = page_size or self.backend.page_sizes()[0]
        return AttentionTrial(self.backend, layer, size, dtype, dtype, self.device, capacity)


@dataclass(frozen=True)
class Case:
    """A layer with types of model and cache."""

    layer: AttentionLayer
    dtype: torch.dtype
    kv_dtype: torch.dtype

    def __str__(self) -> str:
        x = self.layer
        return (
            f"{x.num_heads} heads, {x.num_kv_heads} KV heads, head size {x.head_size}, scale {x.scale:.3g}, window "
            f"{x.sliding_window}, cap {x.soft_cap}, {str(self.dtype)[6:]}, cache {str(self.kv_dtype)[6:]}"
        )


def drawn_case(draw: random.Random) -> Case:
    """Anything that a model may have, and a little more."""
    heads, kv_heads = draw.choice(HEADS)
    if INTERPRETED:
        heads, kv_heads = heads // kv_heads, 1
    size = draw.choice(HEAD_SIZES)
    dtype = draw.choice(MODEL_DTYPES)
    kv_dtype = draw.choice((dtype, dtype, draw.choice(KV_DTYPES)))
    window = draw.choice((None, None, 1, draw.randint(2, 12), draw.randint(13, 90), 2**30))
    cap = draw.choice((None, None, draw.uniform(0.5, 5.0), 50.0))
    scale = size**-0.5 * draw.choice((1.0, 1.0, 0.3, 1.5))
    return Case(AttentionLayer(0, heads, kv_heads, size, scale, window, cap), dtype, kv_dtype)


def drawn_load(draw: random.Random) -> list[Rows]:
    """Steps of a few sequences each: single tokens, a few, chunks and prompts, mixed."""
    steps, most, longest = (2, 2, 20) if INTERPRETED else (4, 4, 130)
    load: list[Rows] = []
    for _ in range(steps):
        sequences = draw.sample(range(6), draw.randint(1, most))
        load.append(tuple((s, min(longest, draw.choice((1, 1, draw.randint(2, 6), draw.randint(7, longest)))))
                          for s in sequences))  # fmt: skip
    return load


def check(run: AttentionTrial, load: Sequence[Rows], what: object) -> None:
    """The definition and the backend agree on every step."""
    for number, rows in enumerate(load):
        difference = run.step(rows)
        assert difference < TOLERANCE[run.dtype], (
            f"off by {difference:.2g} in step {number}, (sequence, new tokens) {rows}, pages of {run.pool.page_size}: "
            f"{what}"
        )


@dataclass(frozen=True)
class Projection:
    """What a projection has put out for rows of one token, merged [t, (heads + 2 * kv_heads) * head_size], and what
    queries and keys go through ahead of attention."""

    backend: AttentionBackend
    layer: AttentionLayer
    merged: torch.Tensor
    rotation: Rotation

    def attended(self, cache: torch.Tensor, plan: Any) -> torch.Tensor | None:
        """What the backend makes of it."""
        size = self.layer.head_size
        of_keys = self.layer.num_kv_heads * size
        query, key, value = torch.split(self.merged, [self.layer.num_heads * size, of_keys, of_keys], dim=1)
        return self.backend.attend_projected(self.layer, query, key, value, self.rotation, cache, plan)

    def turned(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(query, key, value) [t, h, head_size] as `forward` takes them, rounded after the norm and after the
        rotation."""
        query, key, value = self._heads()
        norms = self.rotation.norms
        weights = (None, None) if norms is None else (norms.query, norms.key)
        return self._turned(query, weights[0]), self._turned(key, weights[1]), value

    def _heads(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return split_heads(self.layer, self.merged.view(len(self.merged), -1, self.layer.head_size))

    def _turned(self, heads: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        dtype = heads.dtype
        if weight is not None and self.rotation.norms is not None:
            wide = heads.float()
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.rotation.norms.eps)
            heads = (wide.to(dtype).float() * weight.float()).to(dtype)
        cos, sin = self.rotation.cos_sin[self.rotation.positions].chunk(2, dim=-1)
        first, second = heads.float().chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(dtype)


def drawn_projection(run: AttentionTrial, batch: AttentionBatch, *, normed: bool) -> Projection:
    """Random, for a batch of rows of one token; the rotary embedding turns whole heads."""
    size, device = run.layer.head_size, run.device
    merged = run.draw_merged(batch.num_tokens).flatten(1).to(device)
    weights = (1 + run.draw(1, run.layer.num_heads)[0, :2].float() / 4).to(device, run.dtype)
    norms = HeadNorms(weights[0].contiguous(), weights[1].contiguous(), 1e-6) if normed else None
    angles = torch.outer(torch.arange(batch.max_seq_len), torch.arange(1, size // 2 + 1) / size)
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    return Projection(run.backend, run.layer, merged, Rotation(batch.seq_lens.long() - 1, table, norms))


class StepPlannedOnce:
    """One layer of a decode step as the engine's graphs run it: planned once, launched as usual the first time, then on
    a GPU replayed from a graph, elsewhere launched again."""

    def __init__(
        self, claims: Claims, layer: AttentionLayer, cache: torch.Tensor, merged: torch.Tensor, plan: Any
    ) -> None:
        self._backend, self._layer, self._cache, self._plan = claims.backend, layer, cache, plan
        self._given = split_heads(layer, merged)
        self._captures = claims.device == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output = torch.empty(0)

    def run(self, lengths: np.ndarray[Any, np.dtype[np.int32]]) -> torch.Tensor:
        """The layer's output for rows of these lengths, which are on the device already."""
        self._backend.follow(self._plan, lengths)
        if self._graph is not None:
            self._output.fill_(torch.nan)
            self._graph.replay()
            return self._output.clone()
        output = self._launch()
        if self._captures:
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._output = self._launch()
        return output

    def _launch(self) -> torch.Tensor:
        return self._backend.forward(self._layer, *self._given, self._cache, self._plan)
