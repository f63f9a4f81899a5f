"""A model on trial: run over a paged cache, step by step, as the engine would, with the logits of every token.

For authors of models: `ModelTrial(model, context.attention_layers, backend)` takes any number of sequences, in any
pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from llmkit.layers.context import ForwardContext
from llmkit.testing.paged_attention import PagedPool

if TYPE_CHECKING:
    from llmkit.hookspecs.attention import AttentionBackend, AttentionLayer
    from llmkit.layers.causal_lm import CausalLM

Sequences = Mapping[int, torch.Tensor]
"""Number of a sequence → its token ids, int64 [t]."""


class ModelTrial:
    """Feeds sequences to a model and keeps their keys and values in pages in random order.

    The cache starts as NaN: whoever reads what nobody wrote is seen. `pool` says where each sequence is.
    """

    def __init__(
        self,
        model: CausalLM,
        layers: Sequence[AttentionLayer],
        backend: AttentionBackend,
        *,
        page_size: int = 4,
        num_pages: int = 256,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """layers: the model's `context.attention_layers`. dtype: of the cache."""
        self.model, self.backend, self.device = model, backend, device
        self.pool = PagedPool(num_pages, page_size, seed=3)
        self.caches = self.pool.caches(backend, layers, dtype, fill=float("nan"), device=device)

    def step(self, tokens: Sequences) -> dict[int, torch.Tensor]:
        """Append tokens to sequences in one pass; sequence → float32 logits [t, vocabulary] of each of them, on the
        host."""
        logits = self.logits(tokens)
        return dict(zip(tokens, torch.split(logits, [len(ids) for ids in tokens.values()]), strict=True))

    def logits(self, tokens: Sequences, output_rows: torch.Tensor | None = None) -> torch.Tensor:
        """Append tokens to sequences in one pass: logits of them all, one sequence after the other. output_rows: the
        only ones that are wanted, as `ForwardContext.output_rows`; a model may return the others, too."""
        rows = [(sequence, len(ids)) for sequence, ids in tokens.items()]
        metadata = self.backend.plan(self.pool.step(rows, self.device))
        context = ForwardContext(self.backend, [metadata] * len(self.caches), self.caches, output_rows)
        ids = torch.cat(list(tokens.values())).to(self.device)
        positions = self.pool.positions(rows).to(self.device)
        given = ids.clone(), positions.clone()
        with torch.inference_mode():
            hidden = self.model.forward(ids, positions, context)
            logits = self.model.logits(hidden)
        same = torch.equal(ids, given[0]) and torch.equal(positions, given[1])
        assert same, "forward() changed the token ids or positions that it was given; the engine uses them again"
        allowed = {len(ids)} if output_rows is None else {len(ids), len(output_rows)}
        assert hidden.shape[0] in allowed, f"{hidden.shape[0]} hidden states for {len(ids)} tokens"
        assert logits.dtype is torch.float32, f"logits are {logits.dtype}, not float32"
        return logits.cpu()

    def run(self, sequences: Sequences, chunks: Sequence[Mapping[int, int]]) -> dict[int, torch.Tensor]:
        """Feed whole sequences, each step taking so many tokens of each; sequence → logits of all its tokens."""
        done = dict.fromkeys(sequences, 0)
        parts: dict[int, list[torch.Tensor]] = {s: [] for s in sequences}
        for chunk in chunks:
            result = self.step({s: sequences[s][done[s] : done[s] + n] for s, n in chunk.items()})
            for s, n in chunk.items():
                done[s] += n
                parts[s].append(result[s])
        assert all(done[s] == len(ids) for s, ids in sequences.items()), "the chunks do not add up to the sequences"
        return {s: torch.cat(p) for s, p in parts.items()}

    def share(self, source: int, target: int, num_pages: int) -> None:
        """Let a new sequence begin with the first pages of another, as after a hit in the prefix cache."""
        self.pool.tables[target] = self.pool.tables[source][:num_pages]
        self.pool.lengths[target] = num_pages * self.pool.page_size


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a share of the largest expected value; infinite where anything is not a number."""
    error = ((actual - expected).abs().max() / expected.abs().max()).item()
    return error if error == error else float("inf")
