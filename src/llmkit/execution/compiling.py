"""Compiled kernels that are there before the first request needs them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from llmkit.errors import described
from llmkit.jit import known, runtime
from llmkit.logs import START_LOGGER
from llmkit.requests.message import EngineRequest
from llmkit.requests.sampling_params import SamplingParams
from llmkit.scheduling.plan import AddedRow, StepPlan

if TYPE_CHECKING:
    from llmkit.execution.model_runner import ModelRunner
    from llmkit.execution.setup import WorkerSetup
    from llmkit.kv_cache.layout import KVCacheLayout

logger = logging.getLogger("llmkit.execution")

PROMPT_TOKENS = 16
"""More than one row of everything is enough for kernels of many rows."""

_KINDS = ("model", "kernels", "quantization", "attention")


def compile_ahead(runner: ModelRunner, setup: WorkerSetup, layout: KVCacheLayout) -> None:
    """On the CPU: have what a first request needs compiled, by a prompt of zeros and a token behind it, unless all of
    it was compiled before. Blocks of the cache are written to that nobody has.

    A step that fails here is logged; requests will tell.
    """
    if not runtime.loaded():
        return
    chosen = [setup.registry.chosen(kind) for kind in _KINDS]
    names = " ".join(f"{one.kind}:{one.distribution}:{one.name}:{one.version}" for one in chosen)
    users = f"{names} {setup.config.model.dtype}"
    if known.is_known(users):
        return
    logging.getLogger(START_LOGGER).info(
        "The CPU kernels for this model are being compiled: once on this machine, which can take half a minute."
    )
    start = perf_counter()
    try:
        for plan in first_steps(layout, setup.config.model.max_model_len or 1):
            runner.execute(plan)
    except Exception as error:
        logger.warning("The CPU kernels could not be compiled ahead: %s", described(error))
    else:
        logger.info("The CPU kernels are ready after %.1f s.", perf_counter() - start)
        known.remember(users)
    finally:
        runner.execute(_plan(0, 0, removed=[0]))


def first_steps(layout: KVCacheLayout, max_model_len: int) -> Iterator[StepPlan]:
    """A prompt in slot 0 and one token behind it; none where the cache or the model is too small for that."""
    groups = max(1, len(layout.groups))
    most_blocks = (layout.num_blocks - 1) // groups
    num_tokens = min(PROMPT_TOKENS, max_model_len - 2, most_blocks * layout.block_size - 1)
    if num_tokens < 1:
        return
    blocks = -(-(num_tokens + 1) // layout.block_size)
    tables = tuple(list(range(1 + g * blocks, 1 + (g + 1) * blocks)) for g in range(len(layout.groups)))
    prompt = [0] * num_tokens
    request = EngineRequest(
        request_id="compiling", prompt_token_ids=prompt, sampling_params=SamplingParams(temperature=0), max_tokens=2
    )
    yield _plan(0, num_tokens, added=[AddedRow(0, request, 0, 0, prompt, num_tokens, tables)])
    yield _plan(num_tokens, 1)


def _plan(
    num_computed: int, num_new: int, *, added: list[AddedRow] | None = None, removed: list[int] | None = None
) -> StepPlan:
    rows = 1 if num_new else 0
    return StepPlan(
        step=0,
        slots=np.zeros(rows, dtype=np.int32),
        num_computed=np.full(rows, num_computed, dtype=np.int32),
        num_new=np.full(rows, num_new, dtype=np.int32),
        samples=np.ones(rows, dtype=np.bool_),
        added=added or [],
        removed_slots=removed or [],
    )
