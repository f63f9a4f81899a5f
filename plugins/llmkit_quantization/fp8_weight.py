"""A weight as float8 numbers (e4m3: 4 bits of exponent, 3 of mantissa, up to 448) with a scale for each row.

The largest number of a row becomes 448. A number's error is at most a sixteenth of it or, where that is less, 2**-19 of
the row's largest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
MULTIPLE = 16  # what n and k must be a multiple of: libraries multiply nothing else
TURN_ROWS = 64  # rows of a weight to each number of `Fp8Weight.turns`
_PART = 2**24  # elements that are in float32 at a time while a weight is packed


@dataclass(frozen=True)
class Fp8Weight:
    """A weight [n, k]: codes float8 [n, k], scales float32 [n]. turns: zeros int32 [n / TURN_ROWS], rounded up, in
    which programs of a product count one another; after it they are zeros again."""

    codes: torch.Tensor
    scales: torch.Tensor
    turns: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all three."""
        return self.codes.nbytes + self.scales.nbytes + self.turns.nbytes


def takes(n: int, k: int) -> bool:
    """Whether a weight [n, k] can be multiplied with once it is packed."""
    return n % MULTIPLE == 0 and k % MULTIPLE == 0


def packed_bytes(n: int, k: int) -> int:
    """`Fp8Weight.nbytes` of a weight [n, k]."""
    return n * k + 4 * n + 4 * -(-n // TURN_ROWS)


def pack(weight: torch.Tensor) -> Fp8Weight:
    """Of a weight [n, k] of finite numbers of any floating-point type."""
    n, k = weight.shape
    codes = torch.empty((n, k), dtype=FLOAT8, device=weight.device)
    scales = torch.empty(n, dtype=torch.float32, device=weight.device)
    rows = max(1, _PART // max(k, 1))
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        codes[part], scales[part] = rounded_rows(weight[part])
    turns = torch.zeros(-(-n // TURN_ROWS), dtype=torch.int32, device=weight.device)
    return Fp8Weight(codes, scales, turns)


def rounded_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [t, k] → float8 [t, k] and the scale float32 [t] of each row, so that their product is x up to rounding. A row
    of zeros has scale 1; one that is not finite does not become finite."""
    wide = x.float()
    scales = wide.abs().amax(dim=1) / LARGEST
    scales = torch.where(scales == 0, 1.0, scales)
    # Clamped, as a quotient may be rounded to more than the largest, which conversion makes NaN in some releases.
    return (wide / scales[:, None]).clamp(-LARGEST, LARGEST).to(FLOAT8), scales


def widened(packed: Fp8Weight, ids: torch.Tensor | None = None) -> torch.Tensor:
    """The weight [n, k] as float32, or its rows `ids` int64 [t]: [t, k]."""
    codes, scales = packed.codes, packed.scales
    if ids is not None:
        # As bytes: looking rows up is not made for float8 everywhere.
        codes, scales = codes.view(torch.uint8)[ids].view(FLOAT8), scales[ids]
    return codes.float() * scales[:, None]
