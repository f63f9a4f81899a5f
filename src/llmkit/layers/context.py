"""What layers are built with (ModelContext) and what a forward pass carries (ForwardContext)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from llmkit.execution.replay import StepReplayer
    from llmkit.hookspecs.attention import AttentionBackend, AttentionLayer
    from llmkit.hookspecs.kernels import KernelTable
    from llmkit.hookspecs.quantization import QuantizationMethod
    from llmkit.layers.config import DecoderConfig


@dataclass(frozen=True)
class ParallelLayout:
    """Which part of every layer this worker holds, and how parts are added up. World size 1 needs no exchange."""

    rank: int = 0
    world_size: int = 1
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None
    all_gather: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass
class ModelContext:
    """Everything a layer may need at construction; passed down as the first argument of every layer.

    `attention_layers` collects the attention layers as they are built: their order is their index.
    `layer_range`: the decoder layers to build, for pipeline parallelism; None: all.
    `max_model_len`: tokens of the longest sequence; None: the configuration's max_position_embeddings.
    """

    config: DecoderConfig
    dtype: torch.dtype
    device: torch.device
    kernels: KernelTable
    quantization: QuantizationMethod
    parallel: ParallelLayout = field(default_factory=ParallelLayout)
    layer_range: range | None = None
    max_model_len: int | None = None
    attention_layers: list[AttentionLayer] = field(default_factory=list)


@dataclass(slots=True)
class ForwardContext:
    """One forward pass. `metadata` and `kv_caches` are indexed by attention layer: layers of one KV group have the
    same metadata object, what `backend.plan` returned for the group.

    output_rows int64[s]: the only tokens whose final hidden states anyone will read, None for all. A model may leave
    the others out from where they stop mattering, behind the last attention, and return [s, hidden_size].

    replayer: where this step may run from a recording: a decoder then runs its layers through `replayer.run`. None:
    they are called as they are.
    """

    backend: AttentionBackend
    metadata: list[Any]
    kv_caches: list[torch.Tensor]
    output_rows: torch.Tensor | None = None
    replayer: StepReplayer | None = None
