"""Fills in every default that depends on the device and the model, and checks the settings against them.

This happens before any weight is read: what cannot work is refused within seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from llmkit.config import EngineConfig
from llmkit.config.sections import Section
from llmkit.engine.device import has_fast_bfloat16, usable_processors
from llmkit.errors import ConfigError, ModelError
from llmkit.hookspecs.plugin import Environment

DTYPES = ("float32", "bfloat16", "float16")
LARGE_GPU_BYTES = 70 * 2**30
ONLINE_COMPILE_WAIT_S = 15.0

SectionT = TypeVar("SectionT", bound=Section)


@dataclass(frozen=True)
class BatchDefaults:
    """Token budget and sequence limit of a step."""

    max_num_batched_tokens: int
    max_num_seqs: int


def batch_defaults(environment: Environment, gpu_bytes: int | None, *, online: bool = False) -> BatchDefaults:
    """By device. online: many users wait for their next tokens, so steps are shorter than where only the end counts. On
    the CPU a step of 2048 tokens takes seconds; a larger one gains nothing."""
    if environment.device_type == "cpu":
        return BatchDefaults(2048, 128 if online else 256)
    if gpu_bytes is not None and gpu_bytes >= LARGE_GPU_BYTES:
        return BatchDefaults(8192 if online else 16384, 1024)
    return BatchDefaults(2048 if online else 8192, 256)


def resolve_dtype(stated: str | None, environment: Environment) -> str:
    """The type that `dtype=auto` means. `stated`: the checkpoint's own; None if it has none of its own (GGUF).

    On the CPU: bfloat16 only where the checkpoint and the processor have it, else float32. On the GPU: the
    checkpoint's, bfloat16 if it does not say; float16 instead of bfloat16 on GPUs that lack it.
    """
    if environment.device_type == "cpu":
        return "bfloat16" if stated == "bfloat16" and has_fast_bfloat16(environment) else "float32"
    wanted = stated or "bfloat16"
    return "float16" if wanted == "bfloat16" and not has_fast_bfloat16(environment) else wanted


def stated_dtype(model_config: Mapping[str, Any]) -> str | None:
    """What config.json says about the type of the weights. Raises ModelError for one that is not supported."""
    name = str(model_config.get("dtype") or model_config.get("torch_dtype") or "").removeprefix("torch.")
    if name and name not in DTYPES:
        raise ModelError(f"The model's config.json has dtype {name!r}; supported are {', '.join(DTYPES)}.")
    return name or None


def longest_sequence(model_config: Mapping[str, Any]) -> int:
    """How many tokens the model allows: max_position_embeddings, stretched by those kinds of rotary scaling whose
    factor is not already in it. "dynamic" is not stretched: its frequencies would change with the length of a
    sequence, and with them every key in the cache. Raises ModelError if config.json does not say."""
    limit = model_config.get("max_position_embeddings")
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ModelError(f"The model's config.json needs max_position_embeddings of at least 1, got {limit!r}.")
    scaling = model_config.get("rope_parameters") or model_config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        return limit
    kind = scaling.get("rope_type") or scaling.get("type")
    factor = scaling.get("factor")
    if "rope_local_base_freq" in model_config:
        return limit  # only some layers are scaled; such models state the scaled length
    if not isinstance(factor, (int, float)):
        return limit
    if kind == "linear":
        return int(limit * factor)
    if kind == "yarn":
        return max(limit, int(scaling.get("original_max_position_embeddings", limit) * factor))
    return limit


def resolve_config(
    config: EngineConfig,
    model_config: Mapping[str, Any],
    *,
    device: str,
    environment: Environment,
    gpu_bytes: int | None = None,
    online: bool = False,
) -> EngineConfig:
    """`config` with every default filled in that depends on the device and on the model's config.json. online: of an
    engine that serves many users, see `batch_defaults`; it is ready for its first grammar, and none waits for ever.

    Block size and number of blocks stay open: they are the worker's to decide. Raises ConfigError, ModelError.
    """
    model, scheduler, cache = config.model, config.scheduler, config.kv_cache
    dtype = model.dtype if model.dtype != "auto" else resolve_dtype(stated_dtype(model_config), environment)
    # Who names a type wants its arithmetic.
    quantization = "none" if model.quantization == "auto" and model.dtype != "auto" else model.quantization
    length = _resolve_length(model.max_model_len, model_config)
    defaults = batch_defaults(environment, gpu_bytes, online=online)
    sequences = scheduler.max_num_seqs or defaults.max_num_seqs
    budget = scheduler.max_num_batched_tokens or max(defaults.max_num_batched_tokens, sequences)
    if not scheduler.enable_chunked_prefill:
        budget = _whole_prompt_budget(scheduler.max_num_batched_tokens, budget, length)
    structured = config.structured
    preload, wait_s = structured.preload_grammars, structured.compile_wait_s
    return config.model_copy(
        update={
            "structured": _with(
                structured,
                preload_grammars=online if preload is None else preload,
                compile_wait_s=ONLINE_COMPILE_WAIT_S if online and wait_s is None else wait_s,
            ),
            "model": _with(model, dtype=dtype, quantization=quantization, max_model_len=length),
            "scheduler": _with(scheduler, max_num_seqs=sequences, max_num_batched_tokens=budget),
            "kv_cache": _with(cache, dtype=dtype if cache.dtype == "auto" else cache.dtype),
            "execution": _with(
                config.execution,
                device=device,
                num_threads=config.execution.num_threads or usable_processors(),
            ),
        }
    )


def _with(section: SectionT, **changes: Any) -> SectionT:
    return section.model_copy(update=changes)


def _resolve_length(asked: int | None, model_config: Mapping[str, Any]) -> int:
    limit = longest_sequence(model_config)
    if asked is not None and asked > limit:
        raise ConfigError(
            f"max_model_len must be from 1 to {limit}, which is what the model allows; got {asked}.",
        )
    return asked or limit


def _whole_prompt_budget(asked: int | None, budget: int, length: int) -> int:
    """Without chunked prefill every prompt must fit one step."""
    if asked is not None and asked < length:
        raise ConfigError(
            f"without chunked prefill a whole prompt must fit one step: max_num_batched_tokens ({asked}) must be at "
            f"least max_model_len ({length})."
        )
    return max(budget, length)
