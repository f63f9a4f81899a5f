"""An attention backend on trial: compared with attention by its definition.

For authors of attention backends: `check_attention_backend(MyBackend())` runs the conformance scenarios.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from llmkit.hookspecs.attention import AttentionBackend, AttentionLayer, AttentionQuery
from llmkit.testing.paged_attention import PagedPool, dense_attention

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest difference from the definition that rounding explains, for values of the size that is drawn here."""

# heads, kv heads, head size, window, cap
SHAPES = {
    "one head": (1, 1, 16, None, None),
    "grouped": (9, 3, 64, None, None),
    "multi query": (8, 1, 32, None, None),
    "multi head": (4, 4, 48, None, None),
    "wide head": (2, 1, 128, None, None),
    "window": (4, 2, 32, 7, None),
    "window of one": (2, 2, 16, 1, None),
    "window over pages": (6, 2, 64, 40, None),
    "cap": (4, 2, 64, None, 3.0),
    "window and cap": (4, 1, 32, 21, 2.0),
}

# (sequence, new tokens) of the rows of every step
STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 5), (1, 70), (2, 1)),  # prompts
    ((0, 1), (1, 3), (2, 17)),  # decode, a few drafts, a chunk
    ((2, 1), (0, 1), (1, 1)),  # decode, in another order
    ((3, 33),),
    ((0, 30), (3, 1), (1, 1)),
)


def shaped_layer(name: str) -> AttentionLayer:
    """The layer called `name` in SHAPES."""
    heads, kv_heads, size, window, cap = SHAPES[name]
    return AttentionLayer(0, heads, kv_heads, size, size**-0.5, window, cap)


class AttentionTrial:
    """Feeds random tokens of several sequences through a backend and through the definition.

    The cache starts as NaN, and block tables end in page numbers far outside: whoever reads what is not theirs is seen.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        layer: AttentionLayer,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.backend, self.layer, self.dtype, self.kv_dtype, self.device = backend, layer, dtype, kv_dtype, device
        self.pool = PagedPool(num_pages=1200 // page_size + 12, page_size=page_size, seed=page_size)
        self.cache = self.pool.caches(backend, [layer], kv_dtype, fill=float("nan"), device=device)[0]
        self._random = torch.Generator().manual_seed(page_size)
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def draw(self, tokens: int, heads: int) -> torch.Tensor:
        """Random [tokens, heads, head_size] in the model's type, on the host."""
        return torch.randn(tokens, heads, self.layer.head_size, generator=self._random).to(self.dtype)

    def step(self, rows: Sequence[tuple[int, int]]) -> float:
        """Append tokens, `rows` = (sequence, new tokens); the largest difference between the two over these tokens.

        Raises AssertionError for an output of another shape or type than the query's."""
        batch = self.pool.step(rows, self.device)
        layer = self.layer
        query = self.draw(batch.num_tokens, layer.num_heads)
        # Views with a row stride, as a merged projection gives them.
        key_value = self.draw(batch.num_tokens, 2 * layer.num_kv_heads)
        key, value = key_value[:, : layer.num_kv_heads], key_value[:, layer.num_kv_heads :]
        device_kv = key_value.to(self.device)
        output = self.backend.forward(
            layer,
            query.to(self.device),
            device_kv[:, : layer.num_kv_heads],
            device_kv[:, layer.num_kv_heads :],
            self.cache,
            self.backend.plan(batch),
        ).cpu()
        assert output.shape == query.shape, f"shape {tuple(output.shape)} instead of {tuple(query.shape)}"
        assert output.dtype == query.dtype, f"{output.dtype} instead of {query.dtype}"
        worst = 0.0
        for r, (sequence, _) in enumerate(rows):
            part = slice(batch.query_start_loc_np[r], batch.query_start_loc_np[r + 1])
            for history, new in ((self._keys, key), (self._values, value)):
                old = history.get(sequence, new[:0])
                history[sequence] = torch.cat((old, new[part].to(self.kv_dtype).to(new.dtype)))
            expected = dense_attention(layer, query[part], self._keys[sequence], self._values[sequence])
            difference = (output[part].double() - expected).abs().max().item()
            worst = difference if not difference <= worst else worst  # NaN counts as worst
        return worst


def check_attention_backend(
    backend: AttentionBackend,
    *,
    device: torch.device | str = "cpu",
    dtypes: Iterable[torch.dtype] = (torch.float32, torch.bfloat16),
    compute_capability: tuple[int, int] | None = None,
) -> int:
    """Conformance of a backend: prompts, chunks and decode rows mixed, grouped heads, windows and soft caps, on all of
    its page sizes up to 64, must agree with the definition. Kinds of layers that `support` has reasons against are
    left out.

    Returns how many kinds of layer were checked, over all types. Raises AssertionError; also if there were none.
    """
    checked = 0
    pages = [size for size in backend.page_sizes() if size <= 64] or [min(backend.page_sizes())]
    for dtype in dtypes:
        for name in SHAPES:
            layer = shaped_layer(name)
            query = AttentionQuery(
                device_type=torch.device(device).type,
                compute_capability=compute_capability,
                dtype=dtype,
                kv_dtype=dtype,
                num_heads=layer.num_heads,
                num_kv_heads=layer.num_kv_heads,
                head_size=layer.head_size,
                sliding_window=layer.sliding_window,
                soft_cap=layer.soft_cap,
            )
            if backend.support(query).reasons:
                continue
            checked += 1
            for page_size in pages:
                trial = AttentionTrial(backend, layer, page_size, dtype, dtype, device)
                for number, rows in enumerate(STEPS):
                    difference = trial.step(rows)
                    assert difference < TOLERANCE[dtype], (
                        f"{name}, {dtype}, pages of {page_size}, step {number}: off by {difference}"
                    )
    assert checked, "support() has reasons against every kind of layer"
    return checked
