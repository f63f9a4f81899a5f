"""When freed memory goes back to the system."""

from __future__ import annotations

import sys

import psutil
import pytest
import torch

from llmkit.execution.freeing import give_back_memory, keep_freed_memory, return_freed_memory

MIB = 1 << 20


def kept_after(nbytes: int) -> int:
    """Bytes that stay resident after as many were written and freed."""
    process = psutil.Process()
    give_back_memory(torch.device("cpu"))
    before = process.memory_info().rss
    tensor = torch.ones(nbytes, dtype=torch.uint8)
    assert process.memory_info().rss - before > nbytes // 2
    del tensor
    return int(process.memory_info().rss - before)


@pytest.mark.skipif(sys.platform != "linux", reason="tunes glibc")
def test_large_blocks_go_back_while_loading_and_stay_for_steps() -> None:
    kept_after(MIB)  # what runs for the first time stays, too
    return_freed_memory()
    for size in (2, 7, 3, 31):
        assert kept_after(size * MIB) < MIB
    keep_freed_memory()
    assert kept_after(64 * MIB) > 32 * MIB
    return_freed_memory()
    assert kept_after(64 * MIB) < 2 * MIB
    keep_freed_memory()
