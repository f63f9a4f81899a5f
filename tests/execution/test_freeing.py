"""When freed memory goes back to the system, and when memory for steps comes."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import pytest

from llmkit.execution.freeing import grow_heap
from llmkit.mapped_memory import commit

# In a process of its own: what tests before left in the heap decides where blocks of the next ones go.
PROGRAM = """
import psutil, torch
from llmkit.execution.freeing import keep_freed_memory, return_freed_memory

MIB = 1 << 20
resident = lambda: psutil.Process().memory_info().rss

def kept_after(size):
    before = resident()
    tensor = torch.ones(size * MIB, dtype=torch.uint8)
    assert resident() - before > size * MIB // 2
    del tensor
    return (resident() - before) // MIB

kept_after(1)  # what runs for the first time stays, too
return_freed_memory()
print([kept_after(size) for size in (2, 7, 3, 31, 64)])
keep_freed_memory()
print(kept_after(64))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="tunes glibc")
def test_large_blocks_go_back_while_loading_and_stay_for_steps() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    while_loading, in_steps = ended.stdout.splitlines()
    assert max(json.loads(while_loading)) <= 1
    assert 60 < int(in_steps) < 68


# Blocks below the limit, 20 MiB at a time, as converting a weight piece by piece takes them.
CONVERSION = """
import resource, torch
from llmkit.execution.freeing import return_freed_memory

return_freed_memory()

def convert():
    pieces = [torch.ones(1 << 17) for _ in range(40)]
    del pieces

convert()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    convert()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="tunes glibc")
def test_small_blocks_stay_while_loading() -> None:
    """The top of the heap used to go back to the system with each: thousands of pages to clear every time."""
    ended = subprocess.run([sys.executable, "-c", CONVERSION], capture_output=True, text=True, timeout=60, check=True)
    assert int(ended.stdout) < 50 * 5120 // 10


GROWN = """
import resource, torch
from llmkit.execution.freeing import grow_heap, keep_freed_memory
from llmkit.mapped_memory import commit

MIB = 1 << 20
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(1)
keep_freed_memory()
commit(*grow_heap(64 * MIB))
before = faults()
tensors = [torch.ones(8 * MIB, dtype=torch.uint8) for _ in range(4)]
print(faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="tunes glibc")
def test_what_is_put_into_the_heap_and_committed_needs_no_page_any_more() -> None:
    ended = subprocess.run([sys.executable, "-c", GROWN], capture_output=True, text=True, timeout=60, check=True)
    pages = 32 * 256
    assert int(ended.stdout) < pages // 20


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has no library of that kind, and other systems other numbers for the same advice."""

    def refuse(_name: object) -> None:
        raise TypeError("bad argument type for built-in operation")

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert grow_heap(1 << 20) is None
    commit(1 << 20, 1 << 20)
