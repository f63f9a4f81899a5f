"""Gumbel noise for exact sampling: argmax(logits + noise) is a draw from softmax(logits).

Source of the method: Gumbel, "Statistical theory of extreme values and some practical applications", 1954;
Maddison, Tarlow, Minka, "A* sampling", 2014. The noise of a vocabulary entry depends on nothing but the sequence's
seed, the position that is sampled and the entry's index. So a seeded answer is the same alone or in any batch, and
whether noise is computed for all entries or only for those that truncation left.

Word `index % 4` of philox4x32(counter=(index // 4, position, 0, 0), key=seed) belongs to entry `index`.
"""

from __future__ import annotations

import torch

from llmkit.sampling.philox import philox4x32, split_seed

_LARGEST = 1.0 - 2.0**-24


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """seeds, positions int64[n] → noise float32[n, vocab_size]."""
    blocks = torch.arange((vocab_size + 3) // 4, device=seeds.device).unsqueeze(0)
    words = _words(seeds.unsqueeze(1), positions.unsqueeze(1), blocks)
    bits = torch.empty((len(seeds), blocks.shape[1], 4), dtype=torch.float32, device=seeds.device)
    for lane, word in enumerate(words):
        bits[:, :, lane] = word
    return _gumbel(bits.view(len(seeds), -1)[:, :vocab_size])


def gumbel_noise_at(seeds: torch.Tensor, positions: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The same noise, for vocabulary entries `indices` int64[n, k] only → float32[n, k]."""
    words = torch.stack(_words(seeds.unsqueeze(1), positions.unsqueeze(1), indices >> 2), dim=-1)
    return _gumbel(words.gather(-1, (indices & 3).unsqueeze(-1)).squeeze(-1).to(torch.float32))


def _words(seeds: torch.Tensor, positions: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    zero = torch.zeros_like(positions)
    return philox4x32((blocks, positions, zero, zero), split_seed(seeds))


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Random words as float32 → -log(-log(1 - u)), u = (word + 1/2) / 2³²; overwrites `bits`.

    Written with 1 - u because large noise, which decides the draw, comes from small u, and float32 is finest
    there; the clamp keeps u below 1 after rounding, so the noise is always finite.
    """
    negative_u = bits.mul_(-(2.0**-32)).sub_(2.0**-33).clamp_(min=-_LARGEST)
    return negative_u.log1p_().neg_().log_().neg_()
