"""How much memory there is and what a full step takes: measured on a GPU, estimated on the CPU and in dry runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from llmkit.execution.cuda.capture_sizes import capture_sizes, common_sizes
from llmkit.execution.kv_tensors import KVTensors, block_bytes
from llmkit.execution.memory import CacheNeeds, MemoryUse, readable
from llmkit.execution.model_runner import forward_context, groups_by_layer
from llmkit.hookspecs.attention import AttentionBatch
from llmkit.jit.rehearsal import Rehearsal
from llmkit.kv_cache.groups import make_group_managers
from llmkit.layers.module import Module
from llmkit.requests.message import EngineRequest
from llmkit.requests.sampling_params import SamplingParams
from llmkit.sampling.sampler import Sampler
from llmkit.scheduling.plan import AddedRow, IntArray

if TYPE_CHECKING:
    from llmkit.config import EngineConfig
    from llmkit.execution.building import BuiltModel

_CGROUP = Path("/sys/fs/cgroup")
_GRAPH_BYTES = 4 << 20  # of a graph, its kernels' arguments and the driver's memory for it
_SAMPLER_COPIES = 3  # float32 tensors the size of the logits that live at once while sampling


@dataclass(frozen=True)
class HostMemory:
    """Bytes of main memory that this process can have, and that are free for it now."""

    total: int
    free: int


def host_memory() -> HostMemory:
    """Main memory, or the control group's share of it where that is less."""
    import psutil  # type: ignore[import-untyped]

    machine = psutil.virtual_memory()
    total, free = int(machine.total), int(machine.available)
    try:
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        # No control group, or one without a limit ("max").
        return HostMemory(total, free)
    return HostMemory(min(total, limit), max(0, min(free, limit - used)))


def host_use(config: EngineConfig, before: HostMemory, weights: int, activations: int) -> MemoryUse:
    """Memory use on the CPU. `before`: as it was before the weights were loaded."""
    left = before.free - weights - activations
    other = before.total - before.free
    utilization = config.kv_cache.cpu_memory_utilization
    share = int(max(0, left) * utilization)
    rule = f"what is taken without the cache, and {utilization:g} (cpu_memory_utilization) of the {readable(left)} left"
    return MemoryUse(
        total=before.total,
        usable=other + weights + activations + share if left > 0 else other + before.free,
        weights=weights,
        activations=activations,
        other=other,
        free=left,
        utilization_key="cpu_memory_utilization",
        usable_rule=rule if left > 0 else "",
    )


def gpu_use(
    config: EngineConfig, device: torch.device, weights: int, activations: int, graphs: int, allocated_before: int
) -> MemoryUse:
    """Memory use on a GPU. `other` is what is not the worker's: contexts, libraries, other processes, and
    `allocated_before`, the bytes that torch held for others in this process before the worker came."""
    free, total = torch.cuda.mem_get_info(device)
    other = max(0, total - free - torch.cuda.memory_reserved(device)) + allocated_before
    utilization = config.kv_cache.gpu_memory_utilization
    return MemoryUse(
        total=total,
        usable=int(total * utilization),
        weights=weights,
        activations=activations,
        other=other,
        free=total - other - weights - activations - graphs,
        utilization_key="gpu_memory_utilization",
        graphs=graphs,
        usable_rule=f"{utilization:g} of it (gpu_memory_utilization)",
    )


def cache_needs(built: BuiltModel, config: EngineConfig) -> CacheNeeds:
    """What the KV cache is made of and how much of it the limits can use. `config` is resolved."""
    layout = built.layout(2)
    length, budget, sequences = limits(config)
    managers = make_group_managers(built.groups, built.block_size)
    return CacheNeeds(
        block_bytes=layout.num_tensors * block_bytes(layout, built.backend),
        block_size=built.block_size,
        blocks_per_sequence=sum(manager.peak_blocks(length, min(length, budget)) for manager in managers),
        max_num_seqs=sequences,
        max_model_len=length,
    )


def limits(config: EngineConfig) -> tuple[int, int, int]:
    """(max_model_len, max_num_batched_tokens, max_num_seqs) of a resolved configuration."""
    length, budget = config.model.max_model_len, config.scheduler.max_num_batched_tokens
    sequences = config.scheduler.max_num_seqs
    if length is None or budget is None or sequences is None:
        raise ValueError("a worker needs max_model_len, max_num_batched_tokens and max_num_seqs to be resolved")
    return length, budget, sequences


def estimated_activations(built: BuiltModel, config: EngineConfig, itemsize: int) -> int:
    """Bytes of temporaries of a full step, and of what the attention backend keeps.

    The widest moment of a layer holds the residual stream, the projection that is worked on and its result, or what
    the model's modules say of themselves; sampling holds a few tensors the size of the logits of all sequences.
    """
    _, tokens, sequences = limits(config)
    return _activations(built, tokens, min(sequences, tokens), itemsize) + built.backend.workspace_bytes()


def estimated_graphs(built: BuiltModel, config: EngineConfig, itemsize: int) -> int:
    """Bytes that the graphs of decode steps take: temporaries of the largest step, which all share, the logits that
    some end in, and each graph's own description."""
    if not built.backend.graph_safe:
        return 0
    sequences = limits(config)[2]
    rows = capture_sizes(sequences)[-1]
    logits = rows * built.config.vocab_size * 4
    return _activations(built, rows, rows, itemsize) + logits + len(common_sizes(sequences)) * _GRAPH_BYTES


def token_activations(built: BuiltModel, itemsize: int) -> int:
    """Bytes of a layer's temporaries for each token."""
    model = built.config
    attention = (2 * model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    widths = (m.activation_width() for m in built.model.modules() if isinstance(m, Module))
    widest = max(3 * model.intermediate_size, attention, *widths)
    return (3 * model.hidden_size + widest) * itemsize


def _activations(built: BuiltModel, tokens: int, sampled: int, itemsize: int) -> int:
    return tokens * token_activations(built, itemsize) + _SAMPLER_COPIES * sampled * built.config.vocab_size * 4


@torch.inference_mode()
def measured_activations(built: BuiltModel, config: EngineConfig, device: torch.device, *, decodes: bool = True) -> int:
    """Bytes of temporaries of a full step on a GPU, and of what the first one leaves behind, such as workspaces: run
    one, with a cache of two blocks that is not written to. decodes: have the kernels of decode steps compiled at the
    same time."""
    before = torch.cuda.memory_allocated(device)
    _, tokens, sequences = limits(config)
    rows = min(sequences, tokens)
    lengths = np.full(rows, tokens // rows, dtype=np.int32)
    lengths[: tokens % rows] += 1
    with Rehearsal(device) as rehearsal:
        if decodes:  # ahead of what loads libraries, beside which they are compiled
            _rehearse_decodes(built, config, device, rehearsal)
        _full_step(built, lengths, device)
        if rehearsal.num_kernels:  # for prompts of other lengths there are others
            for length in (tokens, min(tokens, 128)):
                _full_step(built, np.array([length], dtype=np.int32), device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    cache = _full_step(built, lengths, device)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before - cache
    torch.cuda.empty_cache()
    return peak


def _rehearse_decodes(built: BuiltModel, config: EngineConfig, device: torch.device, rehearsal: Rehearsal) -> None:
    from llmkit.execution.cuda.runner import CudaModelRunner

    length, _, sequences = limits(config)
    CudaModelRunner(
        built.model, built.backend, built.layout(2),
        kernels=built.kernels, vocab_size=built.config.vocab_size, max_num_seqs=sequences, max_model_len=length,
        device=device,
    ).rehearse(rehearsal)  # fmt: skip


def _full_step(built: BuiltModel, lengths: IntArray, device: torch.device) -> int:
    """Launch a step of prompts of `lengths` tokens that all sample; bytes of the cache that it had."""
    layout = built.layout(2)
    kv = KVTensors(layout, built.backend, device)
    batch = _unwritten_batch(lengths, built.page_size, device)
    metadata = [built.backend.plan(batch) for _ in layout.groups]
    context = forward_context(built.backend, metadata, groups_by_layer(layout), kv.layers)
    ids = torch.zeros(int(lengths.sum()), dtype=torch.int64, device=device)
    hidden = built.model.forward(ids, ids, context)
    _sample_all(built.model.logits(hidden[: len(lengths)]))
    return kv.nbytes


def _unwritten_batch(lengths: IntArray, page_size: int, device: torch.device) -> AttentionBatch:
    """Prompts of `lengths` tokens whose pages are all page 0, and whose keys and values go nowhere."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    longest = int(lengths.max())
    return AttentionBatch(
        query_start_loc=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(lengths).to(device),
        block_table=torch.zeros((len(lengths), -(-longest // page_size)), dtype=torch.int32, device=device),
        slot_mapping=torch.full((int(starts[-1]),), -1, dtype=torch.int64, device=device),
        query_start_loc_np=starts,
        seq_lens_np=lengths,
        num_rows=len(lengths),
        num_tokens=int(starts[-1]),
        max_query_len=longest,
        max_seq_len=longest,
        page_size=page_size,
    )


def _sample_all(logits: torch.Tensor) -> None:
    """Sample every row in the most expensive way."""
    rows, vocab_size = logits.shape
    params = SamplingParams(temperature=1.0, top_p=0.9, logprobs=0)
    request = EngineRequest(request_id="", prompt_token_ids=[0], sampling_params=params, max_tokens=1)
    sampler = Sampler(np.zeros((rows, 2), dtype=np.int32), vocab_size, logits.device)
    for slot in range(rows):
        sampler.add(AddedRow(slot, request, 0, slot, [0], 1, ()))
    sampler.sample(logits, np.arange(rows, dtype=np.int32), np.ones(rows, dtype=np.int32))
