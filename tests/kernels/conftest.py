"""The kernel table that tests of Triton kernels are about."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from triton_cases import need_a_gpu

if TYPE_CHECKING:
    from llmkit_kernels.triton_table import TritonKernels


@pytest.fixture
def table() -> TritonKernels:
    need_a_gpu()
    from llmkit_kernels.triton_table import TritonKernels

    return TritonKernels()
