"""Reading weights ahead: the next tensor is read and converted while one is packed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Named = tuple[str, torch.Tensor]

LARGE = 128 << 20  # bytes


def read_ahead(tensors: Iterable[Named]) -> Iterator[Named]:
    """The same tensors in the same order, each asked for in a thread, in this one's context, while the one before is
    in use. Raises what reading raises, in its place.

    Nothing is read beside a tensor of more than LARGE bytes: with two such in a row that would add to the peak of
    memory.
    """
    source, context = iter(tensors), copy_context()
    with ThreadPoolExecutor(1, thread_name_prefix="llmkit-weights") as thread:

        def ask() -> Future[Named | None]:
            return thread.submit(context.run, next, source, None)  # type: ignore[arg-type]

        coming = ask()
        while (item := coming.result()) is not None:
            large = item[1].nbytes > LARGE
            if not large:
                coming = ask()
            yield item
            del item
            if large:
                coming = ask()
