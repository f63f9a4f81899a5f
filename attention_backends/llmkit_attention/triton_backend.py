"""The attention backend around the Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from llmkit.hookspecs.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    AttentionQuery,
    PrefixSharing,
    Rotation,
    SharedPrefixes,
    Support,
)
from llmkit.jit.chain import follows_early
from llmkit_attention.cache_types import held_as
from llmkit_attention.hopper_launch import Attends, HopperPrompts
from llmkit_attention.triton_cache import write_launch
from llmkit_attention.triton_decode_launch import ChooseDecodeTile, DecodeMemory, decode_launch, decode_tile_for, takes
from llmkit_attention.triton_launch import PreparedLaunch
from llmkit_attention.triton_prefix import UNIT
from llmkit_attention.triton_prepare import (
    ARITHMETIC,
    FLOAT8,
    INTERPRETED,
    OfStep,
    Prefix,
    PrefixMemory,
    attention_launches,
    padded,
    product_dtype,
)
from llmkit_attention.triton_schedule import IntArray, Launch, LayerShape, TileChoice, launches, prefix_launch
from llmkit_attention.triton_tiles import MAX_HEAD_SIZE, Device, QueryClass, Tile, tile_for

ChooseTile = Callable[[int, QueryClass, int, Device], Tile]


@dataclass(frozen=True)
class _Plan:
    """decodes: whether every row is one token. writes, attends, projected: launches by what they depend on of layer and
    tensors; the first of each kind fills them."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    query_lens: IntArray
    lengths: IntArray
    prefixes: SharedPrefixes | None
    decodes: bool
    writes: dict[Hashable, PreparedLaunch] = field(default_factory=dict)
    attends: dict[Hashable, tuple[Attends, ...]] = field(default_factory=dict)
    projected: dict[Hashable, PreparedLaunch | None] = field(default_factory=dict)


class TritonAttention(AttentionBackend):
    """Prompts, chunks and decodes in any mixture; arithmetic in the wider of the types of model and cache.

    device: None for the GPU that the first batch is on. choose_tile, choose_decode_tile: replace tables of block sizes.
    """

    graph_safe = True
    # Measured on an H200: 4 to 256 rows that share 128 to 16384 tokens, of eight KV heads of 128 in bfloat16.
    prefix_sharing = PrefixSharing(unit=UNIT, least_rows=4, least_bytes=48 * 2**20, least_row_bytes=2**19)

    def __init__(
        self,
        device: Device | None = None,
        choose_tile: ChooseTile = tile_for,
        choose_decode_tile: ChooseDecodeTile = decode_tile_for,
    ) -> None:
        self._device = device
        self._choose_tile, self._choose_decode_tile = choose_tile, choose_decode_tile
        self._decode_memory = DecodeMemory()
        self._prefix_memory = PrefixMemory()
        self._hopper_prompts = HopperPrompts()
        self._kinds: dict[AttentionLayer, AttentionLayer] = {}  # what launches depend on of a layer: not its place

    def support(self, query: AttentionQuery) -> Support:
        reasons = []
        if query.device_type != "cuda" and not INTERPRETED:
            reasons.append(f"runs on a CUDA GPU, not on {query.device_type}")
        capability = query.compute_capability
        if capability is not None and capability < (8, 0):
            reasons.append(f"needs compute capability 8.0; the GPU has {_dotted(capability)}")
        if query.dtype not in ARITHMETIC:
            reasons.append(f"the model's type {query.dtype} is not float32, bfloat16 or float16")
        if query.kv_dtype not in (*ARITHMETIC, FLOAT8):
            reasons.append(f"the KV cache's type {query.kv_dtype} is not float32, bfloat16, float16 or {FLOAT8}")
        elif query.kv_dtype == FLOAT8 and capability is not None and (8, 0) <= capability < (8, 9):
            reasons.append(f"a cache of {FLOAT8} needs compute capability 8.9; the GPU has {_dotted(capability)}")
        if not 1 <= query.head_size <= MAX_HEAD_SIZE:
            reasons.append(f"head size {query.head_size} is larger than {MAX_HEAD_SIZE}")
        if query.num_heads % query.num_kv_heads:
            reasons.append(f"{query.num_heads} query heads are not a multiple of {query.num_kv_heads} KV heads")
        # Interpreted, it is for tests: anything else is to be preferred.
        return Support(score=-100 if INTERPRETED else 20, reasons=tuple(reasons))

    def page_sizes(self) -> Sequence[int]:
        return (16, 32, 64, 128)

    def plan(self, batch: AttentionBatch) -> _Plan:
        rows = batch.num_rows
        return _Plan(
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table,
            batch.slot_mapping[: batch.num_tokens],
            np.diff(batch.query_start_loc_np[: rows + 1]),
            batch.seq_lens_np[:rows],
            batch.prefixes,
            batch.max_query_len == 1 and batch.num_tokens == rows,
        )

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: _Plan,
    ) -> torch.Tensor:
        if metadata.slot_mapping.shape[0]:
            key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
            if INTERPRETED:  # the interpreter cuts bfloat16 off instead of rounding
                key, value = (held_as(x, kv_cache.dtype) for x in (key, value))
            with _on(key):
                self._write(key, value, kv_cache, metadata)
        return self.attend(layer, query, kv_cache, metadata)

    def slots(self, metadata: _Plan) -> torch.Tensor | None:
        return metadata.slot_mapping

    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor, metadata: _Plan
    ) -> torch.Tensor:
        query = query if query.stride(-1) == 1 else query.contiguous()
        output = torch.empty(query.shape, dtype=torch.float32 if INTERPRETED else query.dtype, device=query.device)
        tokens = metadata.slot_mapping.shape[0]
        if tokens < query.shape[0]:
            output[tokens:] = 0
        if tokens:
            with _on(query):
                self._attend(layer, query, kv_cache, metadata, output)
        return output.to(query.dtype) if INTERPRETED else output

    def attend_projected(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        kv_cache: torch.Tensor,
        metadata: _Plan,
    ) -> torch.Tensor | None:
        norms = rotation.norms
        known = (
            *(
                self._kind(layer),
                query.dtype,
                kv_cache.dtype,
                None if norms is None else (norms.eps, norms.query.dtype),
            ),
            *(query.stride(), key.stride(), value.stride(), kv_cache.stride()),
        )
        if known not in metadata.projected:
            metadata.projected[known] = self._projected(layer, query, key, value, rotation, kv_cache, metadata)
        attend = metadata.projected[known]
        if attend is None:
            return None
        rows, tokens = metadata.slot_mapping.shape[0], query.shape[0]
        output = torch.empty((tokens, layer.num_heads, layer.head_size), dtype=query.dtype, device=query.device)
        if rows < tokens:
            output[rows:] = 0
        weights = (rotation.cos_sin,) * 2 if norms is None else (norms.query, norms.key)
        with _on(query):
            attend(query, key, value, kv_cache, output, *weights, rotation.positions, rotation.cos_sin)
        return output

    def _projected(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        kv_cache: torch.Tensor,
        plan: _Plan,
    ) -> PreparedLaunch | None:
        """The launch that does all of it; None where there is none or other launches are faster."""
        if not plan.decodes or _usable(plan.prefixes, layer) is not None:
            return None
        if not takes(layer, query, key, value, rotation, kv_cache):
            return None
        device, longest = self._of(query.device), int(plan.lengths.max())
        if layer.sliding_window is not None:
            longest = min(longest, layer.sliding_window)
        row_bytes = layer.head_size * kv_cache.itemsize
        tile = self._choose_decode_tile(plan.lengths.shape[0], longest, row_bytes, device)
        if tile is None:
            return None
        of_step = OfStep(plan.query_start_loc, plan.seq_lens, plan.block_table, plan.lengths.shape[0])
        return decode_launch(
            tile, layer, query, key, value, rotation, kv_cache, of_step, plan.slot_mapping, longest, device,
            self._decode_memory, early=follows_early(query.device),
        )  # fmt: skip

    def _write(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, plan: _Plan) -> None:
        known = (key.dtype, kv_cache.dtype, key.stride(), value.stride(), kv_cache.stride())
        write = plan.writes.get(known)
        if write is None:
            write = plan.writes[known] = write_launch(key, value, kv_cache, plan.slot_mapping)
        write(key, value, kv_cache)

    def _attend(
        self, layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor, plan: _Plan, output: torch.Tensor
    ) -> None:
        known = (self._kind(layer), query.dtype, kv_cache.dtype, query.stride(), kv_cache.stride())
        prepared = plan.attends.get(known)
        if prepared is None:
            prepared = plan.attends[known] = self._prepare(layer, query, kv_cache, plan, output)
        for attend in prepared:
            attend(query, kv_cache, output)

    def _prepare(
        self, layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor, plan: _Plan, output: torch.Tensor
    ) -> tuple[Attends, ...]:
        of_step = OfStep(plan.query_start_loc, plan.seq_lens, plan.block_table, plan.lengths.shape[0])
        early, types = follows_early(query.device), (query.dtype, kv_cache.dtype)
        prefix = self._prefix(layer, *types, plan)

        def prepared(launch: Launch) -> Attends:
            return attention_launches(
                launch, layer, query, kv_cache, of_step, output,
                prefix=prefix if launch.one_per_row else None, early=early and launch.one_per_row,
            )  # fmt: skip

        device = self._of(query.device)
        return tuple(
            self._hopper_prompts.take(
                launch, layer, query, kv_cache, of_step, plan.query_lens, device, partial(prepared, launch)
            )
            for launch in self._launches(layer, *types, plan)
        )

    def _of(self, device: torch.device) -> Device:
        if self._device is None:
            self._device = _device_of(device)
        return self._device

    def _kind(self, layer: AttentionLayer) -> AttentionLayer:
        return self._kinds.get(layer) or self._kinds.setdefault(layer, replace(layer, index=0))

    def _launches(
        self, layer: AttentionLayer, dtype: torch.dtype, kv_dtype: torch.dtype, plan: _Plan
    ) -> tuple[Launch, ...]:
        shape, tile_of, device = self._scheduling(layer, dtype, kv_dtype, plan)
        prefixes = _usable(plan.prefixes, layer)
        lengths = plan.lengths if prefixes is None else prefixes.own_lens_np
        return tuple(launches(plan.query_lens, lengths, shape, tile_of, device))

    def _prefix(self, layer: AttentionLayer, dtype: torch.dtype, kv_dtype: torch.dtype, plan: _Plan) -> Prefix | None:
        prefixes = _usable(plan.prefixes, layer)
        if prefixes is None:
            return None
        shape, tile_of, device = self._scheduling(layer, dtype, kv_dtype, plan)
        rows, groups = len(prefixes.members), len(prefixes.group_starts) - 1
        launch = prefix_launch(shape, tile_of("shared"), device, rows, groups)
        return self._prefix_memory.prefix(launch, prefixes, layer)

    def _scheduling(
        self, layer: AttentionLayer, dtype: torch.dtype, kv_dtype: torch.dtype, plan: _Plan
    ) -> tuple[LayerShape, TileChoice, Device]:
        """What launches are scheduled by."""
        itemsize = product_dtype(dtype, kv_dtype).itemsize
        shape = LayerShape(
            layer.num_kv_heads,
            layer.num_heads // layer.num_kv_heads,
            padded(layer.head_size),
            layer.sliding_window,
            max_group=64 if itemsize == 2 else 16,
        )
        device, choose = self._of(plan.seq_lens.device), self._choose_tile

        def tile_of(query_class: QueryClass) -> Tile:
            return choose(shape.padded_head_size, query_class, itemsize, device)

        return shape, tile_of, device


def _usable(prefixes: SharedPrefixes | None, layer: AttentionLayer) -> SharedPrefixes | None:
    """With a window, rows see different parts of what they share."""
    return prefixes if layer.sliding_window is None else None


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _on(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device: for the time being, that of the tensor."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device_of(tensor)
    return nullcontext()


def _device_of(device: torch.device) -> Device:
    """The GPU as scheduling sees it; on the CPU, one of a size that splits something in small tests."""
    if device.type != "cuda":
        return Device(num_processors=8, shared_memory=2**17)
    properties = torch.cuda.get_device_properties(device)
    return Device(
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
        (properties.major, properties.minor),
    )
