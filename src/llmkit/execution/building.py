"""Puts a worker's plugins together: kernels, quantization, model, attention backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from llmkit.errors import ConfigError, ModelError
from llmkit.hookspecs.attention import AttentionLayer, AttentionQuery, Support
from llmkit.kv_cache.layout import KVCacheLayout, KVGroup, KVSpec, group_layers
from llmkit.layers.config import DecoderConfig
from llmkit.layers.context import ModelContext
from llmkit.registry import detect_environment

if TYPE_CHECKING:
    from llmkit.execution.setup import WorkerSetup
    from llmkit.hookspecs.attention import AttentionBackend
    from llmkit.hookspecs.kernels import KernelTable
    from llmkit.hookspecs.plugin import Environment
    from llmkit.hookspecs.quantization import QuantizationMethod
    from llmkit.layers.causal_lm import CausalLM

DEFAULT_BLOCK_SIZE = 16

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = DTYPES | {"fp8": torch.float8_e4m3fn}


@dataclass
class BuiltModel:
    """A model without weights, and what it runs with. block_size: allocation block in tokens; page_size: kernel's.
    quantization: the plugin's name."""

    model: CausalLM
    config: DecoderConfig
    backend: AttentionBackend
    kernels: KernelTable
    groups: tuple[KVGroup, ...]
    block_size: int
    page_size: int
    quantization: str = "none"

    def layout(self, num_blocks: int, *, enable_prefix_caching: bool = True) -> KVCacheLayout:
        """The layout of a cache of so many blocks."""
        return KVCacheLayout(self.groups, num_blocks, self.block_size, self.page_size, enable_prefix_caching)


def build_model(setup: WorkerSetup, device: torch.device) -> BuiltModel:
    """Build all plugins of `setup` and the model on `device` ("meta": no memory is taken).

    Raises PluginError for a plugin that does not exist or cannot be used for this model, ModelError for a bad
    config.json, ConfigError for a block size that the attention backend cannot take.
    """
    config, registry = setup.config, setup.registry
    environment = detect_environment(config.execution.device)
    kernels = cast("KernelTable", registry.create("kernels", config.execution.kernels, environment))
    quantization = _quantization(setup, environment)
    context = ModelContext(
        config=DecoderConfig.from_hf(setup.source.config),
        dtype=DTYPES[config.model.dtype],
        device=device,
        kernels=kernels,
        quantization=quantization,
        max_model_len=config.model.max_model_len,
    )
    plugin, reason = setup.source.plugin or setup.source.architecture, setup.source.plugin_reason
    model = cast("CausalLM", registry.create("model", plugin, environment, reason=reason, context=context))
    kv_dtype = KV_DTYPES[config.model.dtype if config.kv_cache.dtype == "auto" else config.kv_cache.dtype]
    queries = attention_queries(
        context.attention_layers, environment.device_type, environment.compute_capability, context.dtype, kv_dtype
    )
    backend = cast(
        "AttentionBackend",
        registry.create("attention", config.attention.backend, environment, judge=judge_of(queries)),
    )
    block_size, page_size = choose_block_size(backend.page_sizes(), config.kv_cache.block_size)
    groups = kv_groups(context.attention_layers, kv_dtype)
    quantized_by = next((s.name for s in reversed(registry.selections) if s.kind == "quantization"), "none")
    return BuiltModel(model.eval(), context.config, backend, kernels, groups, block_size, page_size, quantized_by)


def _quantization(setup: WorkerSetup, environment: Environment) -> QuantizationMethod:
    """The method that is named; with "auto", the best of those that leave the numbers of the model's files as they
    are."""
    choice, source = setup.config.model.quantization, setup.source
    if choice != "auto":
        reason = "named in the configuration" + (", or a type was (model.dtype)" if choice == "none" else "")
        return cast("QuantizationMethod", setup.registry.create("quantization", choice, environment, reason=reason))
    stored = source.stored_types()

    def judge(method: QuantizationMethod) -> Support:
        return method.support(stored)

    return cast("QuantizationMethod", setup.registry.create("quantization", choice, environment, judge=judge))


def attention_queries(
    layers: Iterable[AttentionLayer],
    device_type: str,
    compute_capability: tuple[int, int] | None,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> tuple[AttentionQuery, ...]:
    """One query for every distinct kind of attention layer, in the order of their first occurrence."""
    return tuple(
        dict.fromkeys(
            AttentionQuery(
                device_type=device_type,
                compute_capability=compute_capability,
                dtype=dtype,
                kv_dtype=kv_dtype,
                num_heads=layer.num_heads,
                num_kv_heads=layer.num_kv_heads,
                head_size=layer.head_size,
                sliding_window=layer.sliding_window,
                soft_cap=layer.soft_cap,
            )
            for layer in layers
        )
    )


def judge_of(queries: Sequence[AttentionQuery]) -> Callable[[object], Support]:
    """A judge of attention backends: a backend is as good as it is for the kind of layer that suits it least."""

    def judge(backend: object) -> Support:
        answers = [cast("AttentionBackend", backend).support(query) for query in queries]
        reasons = dict.fromkeys(reason for answer in answers for reason in answer.reasons)
        worst = min(answers, key=lambda answer: answer.score, default=Support())
        return Support(worst.score, tuple(reasons), worst.grounds)

    return judge


def kv_groups(layers: Iterable[AttentionLayer], dtype: torch.dtype) -> tuple[KVGroup, ...]:
    """KV groups of a model's attention layers. Raises ModelError if they cannot share one pool."""
    specs = {layer.index: KVSpec(layer.num_kv_heads, layer.head_size, dtype, layer.sliding_window) for layer in layers}
    try:
        return group_layers(specs)
    except ValueError as error:
        raise ModelError(f"The model's KV cache cannot be laid out: {error}.") from error


def choose_block_size(page_sizes: Sequence[int], wanted: int | None) -> tuple[int, int]:
    """(block_size, page_size) in tokens: the wanted block and the largest page that divides it.

    Without a wish the block is 16 tokens or, if no page divides that, the smallest page. Raises ConfigError naming
    sizes that would do.
    """
    block_size = DEFAULT_BLOCK_SIZE if wanted is None else wanted
    pages = [page for page in page_sizes if block_size % page == 0]
    if pages:
        return block_size, max(pages)
    if wanted is None:
        return min(page_sizes), min(page_sizes)
    raise ConfigError(
        f"block_size must be a multiple of a page size of the attention plugin ({', '.join(map(str, page_sizes))}), "
        f"got {wanted}."
    )
