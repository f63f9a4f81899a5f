"""What tests of Triton kernels have in common: they run on a GPU where there is one, and interpreted, in the processes
that `test_interpreted.py` and its like start."""

from __future__ import annotations

import os

import pytest
import torch

from llmkit_kernels.torch_table import TorchKernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
REFERENCE = TorchKernels()
# The interpreter cuts bfloat16 off instead of rounding.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
HALVES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

kernels = pytest.mark.skipif(False, reason="interpreted") if INTERPRETED else pytest.mark.gpu


def need_a_gpu() -> None:
    """Skips the test where there is none and nothing is interpreted."""
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers, the same for the same shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, roundings: int = 1) -> None:
    """As near as so many roundings of `dtype` leave them."""
    tolerance = roundings * TOLERANCE[dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Of the same type and shape, and near."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
