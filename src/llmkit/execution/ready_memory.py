"""Memory that is there before the first long prompt needs it.

The system provides memory page by page as it is first written to, and has to clear it; a virtual machine may have to
be given it first. A prompt of a thousand tokens would wait for that longer than for its attention.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from llmkit.execution.freeing import grow_heap
from llmkit.execution.measuring import cache_needs, limits, token_activations
from llmkit.mapped_memory import commit

if TYPE_CHECKING:
    from llmkit.config import EngineConfig
    from llmkit.execution.building import BuiltModel
    from llmkit.execution.kv_tensors import KVTensors

TOKENS = 1024
SHARE = 0.2  # of the size of the weights, at most, so that a small model stays small
GAPS = 2  # temporaries of different sizes leave gaps in the heap


def make_ready(built: BuiltModel, config: EngineConfig, itemsize: int, kv: KVTensors) -> None:
    """Commit memory for the keys, values and temporaries of a prompt of up to TOKENS tokens, on the CPU.

    Goes on in a thread when this returns; nobody has to wait for it, and steps may run meanwhile. Where there can be
    no thread, memory comes when it is written to. itemsize: of the model's type, bytes.
    """
    needs = cache_needs(built, config)
    temporaries = GAPS * token_activations(built, itemsize)
    most = int(built.model.parameter_bytes() * SHARE) // (temporaries + needs.block_bytes // needs.block_size)
    tokens = min(TOKENS, limits(config)[1], most)
    heap = grow_heap(tokens * temporaries)
    ranges = kv.first_blocks(-(-tokens // needs.block_size)) if tokens else []
    if heap is not None:
        ranges.append(heap)
    thread = threading.Thread(target=_commit_all, args=(ranges,), name="llmkit-commit", daemon=True)
    with contextlib.suppress(RuntimeError):  # no more threads, or no room for another's stack
        thread.start()


def _commit_all(ranges: list[tuple[int, int]]) -> None:
    for address, nbytes in ranges:
        commit(address, nbytes)
