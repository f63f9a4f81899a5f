"""Kind `attention`: paged attention over the KV cache.

Layers never know which backend they run on; the backend never knows which model it serves. The core asks
`support` for every distinct kind of layer, takes the page size and cache shape from the backend, calls `plan`
once a step and KV group, and `forward` once a layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmkit.hookspecs.markers import hookspec

if TYPE_CHECKING:
    import numpy as np
    import torch
    from pydantic import BaseModel

    from llmkit.hookspecs.kernels import HeadNorms


@dataclass(frozen=True)
class AttentionQuery:
    """One kind of attention layer on one device; sizes in elements, `sliding_window` in tokens (None: full)."""

    device_type: str
    compute_capability: tuple[int, int] | None
    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_size: int
    sliding_window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True)
class Support:
    """Answer to an AttentionQuery: usable if `reasons` (why not) is empty; "auto" takes the highest `score`. grounds:
    what the score is given for, in words that people read where the choice is explained."""

    score: int = 0
    reasons: tuple[str, ...] = ()
    grounds: str = ""


@dataclass(frozen=True)
class AttentionLayer:
    """What a backend must know of a layer, constant over its life.

    `sliding_window` W: a query at position i sees keys i-W+1..i; None: all up to i. `soft_cap` c: scores become
    c * tanh(score / c) before the mask; None: off. `scale` multiplies q·k.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True)
class PrefixSharing:
    """Which shared prefixes a backend wants to be told of.

    unit: shared tokens are a multiple of it. least_rows: fewer rows are no group. least_bytes, least_row_bytes: in a
    step of n rows of one token there are groups if a layer then reads least_bytes + n * least_row_bytes less of keys
    and values.
    """

    unit: int
    least_rows: int
    least_bytes: int
    least_row_bytes: int

    def least_saved(self, rows: int, bytes_per_token: int) -> int:
        """Keys that must be read less often, where a layer's keys and values of a token are so many bytes."""
        return -(-(self.least_bytes + rows * self.least_row_bytes) // bytes_per_token)


@dataclass
class SharedPrefixes:
    """Groups of rows of one token each whose block tables begin with the same pages. n rows, room for g groups.

    group_starts int32[g+1]: members[group_starts[i]:group_starts[i+1]] are the rows of group i; groups that there are
    not are empty. members int32[n]: row numbers, arbitrary past the last group's.
    shared_lens int32[n]: tokens of each row in pages of the whole group, a multiple of `PrefixSharing.unit`; 0 for rows
    of no group. own_lens int32[n]: all others, at least the new ones; `own_lens_np` is on the host.
    """

    group_starts: torch.Tensor
    members: torch.Tensor
    shared_lens: torch.Tensor
    own_lens: torch.Tensor
    own_lens_np: np.ndarray[Any, np.dtype[np.int32]]


@dataclass
class AttentionBatch:
    """The rows of one step, for one KV group. n rows, t tokens. The `_np` mirrors are on the host.

    query_start_loc int32[n+1]: row r's tokens are query_start_loc[r]:query_start_loc[r+1].
    seq_lens int32[n]: tokens of row r in the cache after this step's are written.
    block_table int32[n, max_pages]: page numbers in the kernel's page size; entries past the end are arbitrary.
    slot_mapping int64[t]: page * page_size + offset where each token's k and v go; negative: do not write.
    prefixes: what rows share, if the backend asks for it (`prefix_sharing`) and it is enough; it may be ignored.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc_np: np.ndarray[Any, np.dtype[np.int32]]
    seq_lens_np: np.ndarray[Any, np.dtype[np.int32]]
    num_rows: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    page_size: int
    prefixes: SharedPrefixes | None = None


@dataclass(frozen=True)
class Rotation:
    """What queries and keys go through between their projection and attention: norms of their heads, if any, and rotary
    embedding.

    positions int64[t]; cos_sin float32 [max_position, rotary_dim]: cosines, then sines, for half-split ("NeoX")
    pairing; rotary_dim <= head_size, the rest of each head is left alone. All of it is there before the step's first
    kernel.
    """

    positions: torch.Tensor
    cos_sin: torch.Tensor
    norms: HeadNorms | None


class AttentionBackend(ABC):
    """Paged, variable-length, causal attention.

    graph_safe: `forward` with a batch of one token a row launches kernels only, which read lengths, block table and
    slot mapping on the device: captured in a CUDA graph they are right for any lengths up to `max_seq_len`, whatever
    `seq_lens_np` was when they were planned, if `follow` is called ahead of each time that they run; and if planned
    with `prefixes`, for any that these tensors tell of.
    prefix_sharing: None if `AttentionBatch.prefixes` is of no use to it.
    """

    graph_safe: bool = False
    prefix_sharing: PrefixSharing | None = None

    @abstractmethod
    def support(self, query: AttentionQuery) -> Support:
        """Whether and how well such a layer runs here. Cheap; initialises nothing."""

    def page_sizes(self) -> Sequence[int]:
        """Page sizes in tokens that the kernel takes; the core's block size is a multiple of one of them."""
        return (16, 32, 64, 128)

    def kv_shape(self, num_pages: int, page_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Shape of one layer's cache. Dimension 0 must be the page, and a page must hold its keys and values,
        so that the core can copy, swap and move whole pages without knowing the rest."""
        return (num_pages, 2, num_kv_heads, page_size, head_size)

    def kv_format(self) -> str:
        """A name for the order of bytes in the cache beyond its shape. Caches that agree in it, in `kv_shape` and in
        type hold the same bytes for the same tokens, so that a connector may give one engine's to another."""
        if type(self).kv_shape is AttentionBackend.kv_shape:
            return "keys-values, head, token, element"
        return f"{type(self).__module__}.{type(self).__qualname__}"

    def workspace_bytes(self) -> int:
        """Bytes of device memory that it keeps from its first step on, beside the cache. Memory plans count them before
        anything has run; afterwards what a step leaves behind is measured."""
        return 0

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> Any:
        """Once a step and KV group: whatever `forward` needs of this batch, as an opaque object."""

    def replays(self, recorded: Any, metadata: Any) -> bool:
        """Whether the kernels that `forward` launched with the metadata `recorded` also do what `metadata` asks for,
        once the tensors of the batch that `recorded` was planned for hold the values of the other batch. Both have as
        many rows of one token each. False: such steps are never run from a recording."""
        return False

    def follow(  # noqa: B027 - optional
        self, metadata: Any, seq_lens_np: np.ndarray[Any, np.dtype[np.int32]]
    ) -> None:
        """Before a step that was planned once runs, or runs again from a graph: the lengths int32[n] of its rows by
        now, up to those that it was planned for. For backends that divide the work on the host; others need nothing.
        The array is the caller's, who overwrites it."""

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
    ) -> torch.Tensor:
        """Write `key`, `value` [t, num_kv_heads, head_size] to the cache, attend with `query`
        [t, num_heads, head_size], return [t, num_heads, head_size]. `metadata` is what `plan` returned."""

    def slots(self, metadata: Any) -> torch.Tensor | None:
        """`slot_mapping` int64[t] of the planned batch, if others may write keys and values where it says, into a cache
        of the default `kv_shape` and order, and call `attend` instead of `forward`; so that they are written by the
        kernel that made them. None: only `forward` writes."""
        return None

    def attend(self, layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any) -> torch.Tensor:
        """`forward` of a batch whose keys and values are in the cache already; for backends with `slots`."""
        raise TypeError(f"{type(self).__name__} writes keys and values itself")

    def attend_projected(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        kv_cache: torch.Tensor,
        metadata: Any,
    ) -> torch.Tensor | None:
        """`forward` of what the projection put out, with all of `rotation` before it: rounded as `KernelTable.rms_norm`
        and `KernelTable.rotary` round, in fewer kernels than one by one.

        query [t, num_heads*head_size], key and value [t, num_kv_heads*head_size] may be views with a row stride, and
        are left as they are. Returns [t, num_heads, head_size]. None: nothing was done, as it does not pay for this
        batch or cannot be done; then norms, rotary embedding and attention are called one by one."""
        return None


@hookspec(firstresult=True)
def llmkit_attention_backend(options: BaseModel | None) -> AttentionBackend:  # type: ignore[empty-body]
    """Build the attention backend. `options` is an instance of `info.options`, validated; None if there is none.

    .. versionadded:: 0.1
    """
