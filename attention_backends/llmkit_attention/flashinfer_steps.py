"""FlashInfer's wrappers for one step and one kind of layer: planned on the host, then run layer by layer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from llmkit.cache_folder import cache_folder
from llmkit.errors import EngineError
from llmkit.hookspecs.attention import AttentionLayer

if TYPE_CHECKING:
    from llmkit_attention.page_lists import PageLists

LAYOUT = "HND"
"""FlashInfer's name for pages of the order that the cache has: heads, then tokens."""

KERNELS = "fa2"
"""FlashInfer's name for its kernels that run on all GPUs; decodes and prompts share what is compiled of them."""

SCHEDULE_BYTES = 2**20
"""Device memory for how the rows of a decode step are divided; FlashInfer takes 8 MiB unless told otherwise."""


class PlannedLayers(Protocol):
    """What the layers of one kind run in a step."""

    def plan(self) -> None:
        """Divide the work by the lengths that the page lists have now."""

    def run(self, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor) -> None:
        """Launch: query, output [t, heads, head_size]."""


class Workspace:
    """What all wrappers share on one device, as no two of them run at once; and those for prompts, used again.

    A wrapper's plan is copied to the device from pinned memory, which torch would give to others when the wrapper goes,
    as it knows nothing of that copy: steps that are done with leave their wrappers here until it is made.
    """

    def __init__(self, mib: int, device: torch.device) -> None:
        keep_what_is_compiled()
        self.memory = torch.zeros(mib * 2**20, dtype=torch.uint8, device=device)
        self._idle: list[_Prompts] = []
        self._leaving: list[_Decodes] = []

    def decodes(
        self, layer: AttentionLayer, dtype: torch.dtype, lists: PageLists, page_size: int
    ) -> tuple[PlannedLayers, Callable[[], None]]:
        """For a step of one token a row, planned anew for as many rows as often as wanted; graphs can hold `run`. And
        what must be called when the step's plan is dropped."""
        self._leaving = [decodes for decodes in self._leaving if not decodes.is_copied]
        decodes = _Decodes(self.memory, arguments_of(layer, dtype, page_size), lists)
        return decodes, partial(self._leaving_now, decodes)

    def _leaving_now(self, decodes: _Decodes) -> None:
        self._leaving.append(decodes)

    def prompts(
        self, layer: AttentionLayer, dtype: torch.dtype, lists: PageLists, page_size: int, starts: torch.Tensor
    ) -> tuple[PlannedLayers, Callable[[], None]]:
        """For one step of any rows; and what gives it back when the step's plan is dropped. starts int32[n+1]: where
        each row's tokens begin, on the host."""
        ready = next((i for i, prompts in enumerate(self._idle) if prompts.is_copied), None)
        prompts = _Prompts(self.memory) if ready is None else self._idle.pop(ready)
        prompts.use(arguments_of(layer, dtype, page_size), lists, starts)

        def give_back() -> None:
            self._idle.append(prompts)

        return prompts, give_back


def keep_what_is_compiled() -> None:
    """In llmkit's cache folder, unless the environment names another, which FlashInfer must be told before it is
    imported."""
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(cache_folder() / "flashinfer"))


def arguments_of(layer: AttentionLayer, dtype: torch.dtype, page_size: int) -> dict[str, Any]:
    """What FlashInfer's `plan` wants to know of a layer whose model and cache have the type `dtype`."""
    return {
        "num_qo_heads": layer.num_heads,
        "num_kv_heads": layer.num_kv_heads,
        "page_size": page_size,
        "window_left": -1 if layer.sliding_window is None else layer.sliding_window - 1,
        "logits_soft_cap": layer.soft_cap,
        "sm_scale": layer.scale,
        "q_data_type": dtype,
        "kv_data_type": dtype,
        "head_dim": layer.head_size,
    }


@contextmanager
def _enough_memory() -> Iterator[None]:
    """Says which option to raise where FlashInfer says that its workspace is too small."""
    try:
        yield
    except RuntimeError as error:
        if "workspace" not in str(error):
            raise
        raise EngineError(
            f"FlashInfer's workspace is too small for this step: {error}",
            hint="Raise the option workspace_mib: --set attention.flashinfer.workspace_mib=…",
        ) from error


class _Copy:
    """FlashInfer's plan copies from pinned memory and does not wait; before that is written again it must be done."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._event: torch.cuda.Event | None = None

    def begun(self) -> None:
        if self._on_gpu:
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_done(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class _Decodes:
    """The plan of a graph stays at its addresses, and how many programs run does not depend on the lengths."""

    def __init__(self, memory: torch.Tensor, arguments: dict[str, Any], lists: PageLists) -> None:
        from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

        self._lists, self._arguments, self._copy = lists, arguments, _Copy(memory.device)
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            memory,
            LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=True,  # for all heads of a group at once, and groups of any size
            paged_kv_indptr_buffer=lists.device_starts,
            paged_kv_indices_buffer=lists.pages,
            paged_kv_last_page_len_buffer=torch.empty(len(lists.last), dtype=torch.int32, device=memory.device),
            backend=KERNELS,
        )
        schedule = torch.empty(SCHEDULE_BYTES, dtype=torch.uint8, device=memory.device)
        self._wrapper.reset_workspace_buffer(memory, schedule)

    @property
    def is_copied(self) -> bool:
        return self._copy.is_done

    def plan(self) -> None:
        lists = self._lists
        self._copy.wait()  # of the step before, in which it came ahead of the kernels
        # The pages themselves are put into their place by the step.
        with _enough_memory():
            self._wrapper.plan(lists.starts, lists.pages[:0], lists.last, seq_lens=lists.lengths, **self._arguments)
        self._copy.begun()

    def run(self, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor) -> None:
        self._wrapper.run(query, kv_cache, out=output)


class _Prompts:
    """The wrapper for any rows, which one step uses after the other."""

    def __init__(self, memory: torch.Tensor) -> None:
        from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(memory, LAYOUT, backend=KERNELS)
        self._copy = _Copy(memory.device)

    @property
    def is_copied(self) -> bool:
        return self._copy.is_done

    def use(self, arguments: dict[str, Any], lists: PageLists, starts: torch.Tensor) -> None:
        """For these rows from here on."""
        self._arguments = {"head_dim_qk" if name == "head_dim" else name: value for name, value in arguments.items()}
        self._lists, self._starts = lists, starts

    def plan(self) -> None:
        lists = self._lists
        self._copy.wait()
        rows = (self._starts, lists.starts, lists.pages, lists.last)
        with _enough_memory():
            self._wrapper.plan(*rows, causal=True, seq_lens=lists.lengths, **self._arguments)
        self._copy.begun()

    def run(self, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor) -> None:
        self._wrapper.run(query, kv_cache, out=output)
