"""An attention backend on trial: compared with attention by its definition.

For authors of attention backends: `check_attention_backend(MyBackend())` runs the conformance scenarios.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from llmkit.hookspecs.attention import AttentionBackend, AttentionBatch, AttentionLayer, AttentionQuery
from llmkit.testing.paged_attention import PagedPool, dense_attention, prefixes_in

TOLERANCE = {
    torch.float64: 2e-5,  # of a float32 softmax
    torch.float32: 2e-5,
    torch.float16: 3e-3,
    torch.bfloat16: 2e-2,
    torch.float8_e4m3fn: 0.3,
}
"""By the model's type: the largest difference from the definition that rounding explains, for values as drawn here."""

USUAL_FORMAT = "keys-values, head, token, element"
"""`kv_format` of backends that leave the cache's shape as it is."""

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


@contextmanager
def single_threaded() -> Iterator[None]:
    """The cases here are small: torch's threads, waiting for one another, would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def shaped_layer(name: str) -> AttentionLayer:
    """The layer called `name` in SHAPES."""
    heads, kv_heads, size, window, cap = SHAPES[name]
    return AttentionLayer(0, heads, kv_heads, size, size**-0.5, window, cap)


def split_heads(layer: AttentionLayer, merged: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """merged [t, num_heads + 2 * num_kv_heads, head_size] → views of the queries, keys and values in it."""
    end = layer.num_heads + layer.num_kv_heads
    return merged[:, : layer.num_heads], merged[:, layer.num_heads : end], merged[:, end:]


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
        capacity: int = 1200,
    ) -> None:
        """capacity: tokens of all sequences together, of which there may be eleven."""
        self.backend, self.layer, self.dtype, self.kv_dtype, self.device = backend, layer, dtype, kv_dtype, device
        self.pool = PagedPool(num_pages=capacity // page_size + 12, page_size=page_size, seed=page_size)
        self.cache = self.pool.caches(backend, [layer], kv_dtype, fill=float("nan"), device=device)[0]
        self._random = torch.Generator().manual_seed(page_size)
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def draw(self, tokens: int, heads: int) -> torch.Tensor:
        """Random [tokens, heads, head_size] in the model's type, on the host."""
        return torch.randn(tokens, heads, self.layer.head_size, generator=self._random).to(self.dtype)

    def draw_merged(self, tokens: int) -> torch.Tensor:
        """Random queries, keys and values of so many tokens, as a merged projection gives them; see `split_heads`."""
        return self.draw(tokens, self.layer.num_heads + 2 * self.layer.num_kv_heads)

    def fill(self, sequence: int, tokens: int) -> None:
        """Append tokens that are not compared: where the cache has the usual order, none are computed either."""
        if self.backend.kv_format() != USUAL_FORMAT:
            self.forward([(sequence, tokens)])
            return
        batch = self.pool.step([(sequence, tokens)])
        slots = batch.slot_mapping.to(self.device)
        pages, offsets = slots // batch.page_size, slots % batch.page_size
        for part, history in enumerate((self._keys, self._values)):
            new = self.draw(tokens, self.layer.num_kv_heads)
            self.cache[pages, part, :, offsets] = new.to(self.device, self.kv_dtype)
            self._remember(history, sequence, new)

    def fork(self, source: int, sequences: Iterable[int], tokens: int) -> None:
        """New sequences that begin with the first tokens of `source`, in the same pages."""
        for sequence in sequences:
            self.pool.fork(source, sequence, tokens)
            for history in (self._keys, self._values):
                history[sequence] = history[source][:tokens]

    def batch(self, rows: Sequence[tuple[int, int]]) -> AttentionBatch:
        """Append tokens in the pool alone. The backend is told of any prefix that it can use, however short."""
        batch = self.pool.step(rows, self.device)
        sharing = self.backend.prefix_sharing
        if sharing is not None:
            batch.prefixes = prefixes_in(batch, sharing)
        return batch

    def step(self, rows: Sequence[tuple[int, int]]) -> float:
        """Append tokens, `rows` = (sequence, new tokens); the largest difference between the two over these tokens.

        Raises AssertionError for an output of another shape or type than the query's."""
        query, output = self.forward(rows)
        assert output.shape == query.shape, f"shape {tuple(output.shape)} instead of {tuple(query.shape)}"
        assert output.dtype == query.dtype, f"{output.dtype} instead of {query.dtype}"
        worst, start = 0.0, 0
        for sequence, new in rows:
            part = slice(start, start + new)
            start += new
            expected = dense_attention(self.layer, query[part], self._keys[sequence], self._values[sequence])
            difference = (output[part].double() - expected).abs().max().item()
            worst = difference if not difference <= worst else worst  # NaN counts as worst
        return worst

    def forward(self, rows: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens; (query, the backend's output), both [t, num_heads, head_size] on the host."""
        batch = self.batch(rows)
        merged = self.draw_merged(batch.num_tokens)
        query, key, value = split_heads(self.layer, merged)
        given = split_heads(self.layer, merged.to(self.device))
        output = self.backend.forward(self.layer, *given, self.cache, self.backend.plan(batch))
        start = 0
        for sequence, new in rows:
            self._remember(self._keys, sequence, key[start : start + new])
            self._remember(self._values, sequence, value[start : start + new])
            start += new
        return query, output.cpu()

    def _remember(self, history: dict[int, torch.Tensor], sequence: int, new: torch.Tensor) -> None:
        """As the cache does: in its type."""
        old = history.get(sequence, new[:0])
        history[sequence] = torch.cat((old, new.to(self.kv_dtype).to(new.dtype)))


@single_threaded()
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
