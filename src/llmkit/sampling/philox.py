"""Counter-based random numbers: Philox-4x32-10.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. A number is a function
of (key, counter) alone, so there is no generator state to keep, copy or lose. Words are kept in int64 tensors,
because torch has no full unsigned 32-bit arithmetic; a GPU kernel with native uint32 gives the same bits.
"""

from __future__ import annotations

import torch

ROUNDS = 10
MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
MASK = 0xFFFFFFFF

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Four random 32-bit words for every counter, as int64 tensors with values in [0, 2³²).

    counter, key: int64 tensors with values in [0, 2³²), of shapes that broadcast together; the result has the
    broadcast shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The products wrap around in 64 bits, which keeps both halves' bits. The arithmetic shift drags the sign
        # into the upper half, and c1 and c3 keep theirs: one mask after the exclusive-ors removes both.
        product0, product1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0 = (product1 >> 32).bitwise_xor(c1).bitwise_xor_(k0).bitwise_and_(MASK)
        c2 = (product0 >> 32).bitwise_xor(c3).bitwise_xor(k1).bitwise_and_(MASK)
        c1, c3 = product1, product0
        k0, k1 = (k0 + WEYL_0) & MASK, (k1 + WEYL_1) & MASK
    return c0, c1 & MASK, c2, c3 & MASK


def split_seed(seeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 seeds (two's complement of 64 bits) → (low, high) 32-bit key words."""
    return seeds & MASK, (seeds >> 32) & MASK
