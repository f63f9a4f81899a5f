"""The random numbers are Philox-4x32-10: the known answers that are published with Random123 (kat_vectors)."""

from __future__ import annotations

import math

import pytest
import torch

from llmkit.sampling.gumbel import gumbel_noise, gumbel_noise_at
from llmkit.sampling.philox import philox4x32, split_seed

FULL = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((FULL, FULL, FULL, FULL), (FULL, FULL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_known_answers(counter, key, expected):
    words = philox4x32(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert tuple(int(word) for word in words) == expected


def test_broadcasting_changes_nothing():
    blocks, positions = torch.arange(5)[None, :], torch.tensor([[3], [9]])
    zero, key = torch.zeros_like(positions), (torch.tensor([[1], [2]]), torch.tensor([[7], [8]]))
    together = philox4x32((blocks, positions, zero, zero), key)
    for row in range(2):
        for column in range(5):
            alone = philox4x32((blocks[:, column], positions[row], zero[row], zero[row]), (key[0][row], key[1][row]))
            assert [int(word) for word in alone] == [int(word[row, column]) for word in together]


def test_negative_seed_is_the_two_s_complement():
    low, high = split_seed(torch.tensor([-2, 0x1234_5678_9ABC_DEF0]))
    assert low.tolist() == [0xFFFFFFFE, 0x9ABCDEF0]
    assert high.tolist() == [0xFFFFFFFF, 0x12345678]


def test_noise_of_single_entries_is_the_noise_of_the_whole():
    seeds, positions = torch.tensor([5, -9]), torch.tensor([0, 1000])
    whole = gumbel_noise(seeds, positions, 1001)
    indices = torch.tensor([[0, 1, 2, 3, 1000], [999, 4, 4, 7, 500]])
    torch.testing.assert_close(gumbel_noise_at(seeds, positions, indices), whole.gather(-1, indices), rtol=0, atol=0)


def test_noise_does_not_depend_on_the_size_of_the_vocabulary():
    seeds, positions = torch.tensor([5]), torch.tensor([2])
    assert torch.equal(gumbel_noise(seeds, positions, 30), gumbel_noise(seeds, positions, 1000)[:, :30])


def test_noise_is_finite_and_has_gumbel_moments():
    noise = gumbel_noise(torch.arange(20), torch.full((20,), 3), 20_000)
    assert noise.isfinite().all()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)


def test_extreme_words_give_finite_noise():
    from llmkit.sampling.gumbel import _gumbel

    assert _gumbel(torch.tensor([0.0, 4294967295.0, 4294967296.0])).isfinite().all()
