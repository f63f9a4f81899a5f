"""A tiny random model with its own paged attention, a dense recomputation of it, and a driver that plans by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from llmkit.execution.building import kv_groups
from llmkit.execution.cuda.runner import CudaModelRunner
from llmkit.execution.model_runner import ModelRunner
from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.hookspecs.attention import AttentionBackend, AttentionBatch, AttentionLayer, AttentionQuery, Support
from llmkit.hookspecs.executor import StepHandle
from llmkit.kv_cache.layout import KVCacheLayout
from llmkit.layers.causal_lm import CausalLM
from llmkit.layers.context import ForwardContext, ModelContext
from llmkit.requests.logprobs import PositionLogprobs
from llmkit.requests.message import EngineRequest
from llmkit.requests.sampling_params import SamplingParams
from llmkit.scheduling.plan import AddedRow, BlockUpdate, StepPlan, StepResult
from llmkit_kernels.torch_table import TorchKernels

VOCAB = 40
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 8
HIDDEN = HEADS * HEAD_SIZE
MAX_LEN = 96
MAX_NUM_SEQS = 8
WINDOW = 6


class PagedAttention(AttentionBackend):
    """The plainest paged attention there is: a loop over rows."""

    def support(self, query: AttentionQuery) -> Support:
        return Support() if query.head_size <= 64 else Support(reasons=(f"head size {query.head_size} is above 64",))

    def page_sizes(self) -> Sequence[int]:
        return (2, 4)

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionBatch,
    ) -> torch.Tensor:
        size = metadata.page_size
        for token, slot in enumerate(metadata.slot_mapping.tolist()):
            if slot < 0:
                continue
            kv_cache[slot // size, 0, :, slot % size] = key[token]
            kv_cache[slot // size, 1, :, slot % size] = value[token]
        output = torch.empty_like(query)
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        for row, length in enumerate(lengths):
            positions = torch.arange(length, device=query.device)
            pages = metadata.block_table[row].long()[positions // size]
            keys = kv_cache[pages, 0, :, positions % size]
            values = kv_cache[pages, 1, :, positions % size]
            part = slice(starts[row], starts[row + 1])
            output[part] = dense_attention(layer, query[part], keys, values)
        return output


def dense_attention(
    layer: AttentionLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """query [t, heads, d], the last t of s tokens; keys, values [s, kv_heads, d] → [t, heads, d]."""
    t, s = len(query), len(keys)
    keys, values = (x.repeat_interleave(layer.num_heads // layer.num_kv_heads, 1) for x in (keys, values))
    scores = torch.einsum("thd,shd->hts", query, keys) * layer.scale
    there = torch.arange(s, device=query.device)[None, :]
    here = there[0, s - t :, None]
    seen = there <= here
    if layer.sliding_window is not None:
        seen &= there > here - layer.sliding_window
    return torch.einsum("hts,shd->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)


class TinyModel(CausalLM):
    """Embedding, one attention per entry of `windows` with a residual, a head. Weights are random."""

    def __init__(
        self, windows: Sequence[int | None], vocab_size: int = VOCAB, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(7)

        def random(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=draw) * 0.5).to(device)

        self.attention = [
            AttentionLayer(i, HEADS, KV_HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, sliding_window=window)
            for i, window in enumerate(windows)
        ]
        self.embedding, self.place = random(vocab_size, HIDDEN), random(MAX_LEN, HIDDEN)
        self.projections = [random(HIDDEN, HIDDEN + 2 * KV_HEADS * HEAD_SIZE) * 0.5 for _ in windows]
        self.head = random(HIDDEN, vocab_size)
        self.poisoned: int | None = None
        self.steps: list[int] = []

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        self.steps.append(len(input_ids))

        def attend(layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            i = layer.index
            return context.backend.forward(layer, q, k, v, context.kv_caches[i], context.metadata[i])

        return self._run(input_ids, positions, attend)

    def dense(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits [t, vocab_size] of a whole sequence, without any cache."""
        ids = torch.tensor(token_ids, device=self.head.device)
        return self.logits(self._run(ids, torch.arange(len(ids), device=ids.device), dense_attention))

    def _run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        hidden = self.embedding[input_ids] + self.place[positions]
        width = KV_HEADS * HEAD_SIZE
        for layer, projection in zip(self.attention, self.projections, strict=True):
            q, k, v = (hidden @ projection).split([HIDDEN, width, width], dim=-1)
            heads = (x.unflatten(-1, (-1, HEAD_SIZE)) for x in (q, k, v))
            hidden = hidden + attend(layer, *heads).flatten(1)
        if self.poisoned is not None:
            hidden = torch.where((input_ids == self.poisoned)[:, None], torch.nan, hidden)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loaded = [name for name, _ in tensors]

    def parameter_bytes(self) -> int:
        return sum(x.nbytes for x in (self.embedding, self.place, self.head, *self.projections))


@dataclass
class Sequence_:
    tokens: list[int]
    num_prompt: int
    computed: int
    blocks: list[list[int]]


@dataclass
class Flight:
    """A step under way. sampling: row → (its sequence, the place of its token)."""

    handle: StepHandle
    sampling: dict[int, tuple[Sequence_, int]]

    def land(self) -> StepResult:
        result = self.handle.result()
        for row, (sequence, place) in self.sampling.items():
            if row in result.failed:
                del sequence.tokens[place]
            else:
                sequence.tokens[place] = int(result.token_ids[row])
        return result


@dataclass
class Driver:
    """Plans steps by hand for one runner. Blocks are never reused, block 0 is the null block."""

    model: TinyModel
    layout: KVCacheLayout
    launched: bool = False
    backend: AttentionBackend = field(default_factory=PagedAttention)
    runner: ModelRunner = field(init=False)
    sequences: dict[int, Sequence_] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # It reads the device's tensors, but waits for them: what a graph cannot hold, and static inputs can.
        self.backend.graph_safe = self.model.head.device.type == "cpu"
        make = partial(CudaModelRunner, kernels=TorchKernels()) if self.launched else ModelRunner
        self.runner = make(
            self.model,
            self.backend,
            self.layout,
            vocab_size=VOCAB,
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=MAX_LEN,
            device=self.model.head.device,
        )
        self._next_block = 1
        self._added: list[AddedRow] = []
        self._removed: list[int] = []
        self._copies: list[tuple[int, int]] = []
        self.swaps_out: list[tuple[int, int]] = []
        self.swaps_in: list[tuple[int, int]] = []
        self._step = 0

    def add(
        self,
        slot: int,
        prompt: Sequence[int],
        output: Sequence[int] = (),
        *,
        seed: int = 0,
        computed: int = 0,
        blocks: list[list[int]] | None = None,
        bad_words: Sequence[Sequence[int]] = (),
        stops: Sequence[int] = (),
        **params: Any,
    ) -> None:
        """A sequence enters with the next step; `blocks` per group hold its first `computed` tokens. bad_words and
        stops as tokens."""
        tokens = [*prompt, *output]
        sequence = Sequence_(tokens, len(prompt), computed, blocks or [[] for _ in self.layout.groups])
        self.sequences[slot] = sequence
        request = EngineRequest(
            request_id=str(slot),
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(**{"temperature": 0.0, "logprobs": -1, **params}),
            max_tokens=MAX_LEN,
            bad_words_ids=tuple(tuple(words) for words in bad_words),
            stop_token_ids=frozenset(stops),
        )
        self._added.append(AddedRow(slot, request, 0, seed, list(tokens), len(prompt), tuple(sequence.blocks)))

    def remove(self, slot: int) -> Sequence_:
        self._removed.append(slot)
        return self.sequences.pop(slot)

    def copy_block(self, source: int) -> int:
        self._copies.append((source, self.new_block()))
        return self._copies[-1][1]

    def new_block(self) -> int:
        self._next_block += 1
        return self._next_block - 1

    def step(self, work: Mapping[int, int]) -> StepResult:
        """work: slot → tokens to compute. A row samples when it reaches its end; the token is appended."""
        return self.submit(work).land()

    def submit(self, work: Mapping[int, int]) -> Flight:
        """Start `step`; until it lands, -1 stands for the tokens that it samples."""
        rows = [(slot, self.sequences[slot], new) for slot, new in work.items()]
        updates = [u for slot, sequence, new in rows for u in self._grow(slot, sequence, sequence.computed + new)]
        entering = {row.slot for row in self._added}
        plan = StepPlan(
            step=self._step,
            slots=np.array([slot for slot, _, _ in rows], dtype=np.int32),
            num_computed=np.array([s.computed for _, s, _ in rows], dtype=np.int32),
            num_new=np.array([new for _, _, new in rows], dtype=np.int32),
            samples=np.array([s.computed + new == len(s.tokens) for _, s, new in rows], dtype=np.bool_),
            added=self._added,
            # Rows that enter carry their blocks with them.
            block_updates=[u for u in updates if u.slot not in entering],
            block_copies=self._copies,
            swaps_out=self.swaps_out,
            swaps_in=self.swaps_in,
            removed_slots=self._removed,
        )
        self.swaps_out, self.swaps_in = [], []
        self._added, self._removed, self._copies = [], [], []
        self._step += 1
        handle = self.runner.submit(plan)
        flight = Flight(handle, {})
        for row, (_, sequence, new) in enumerate(rows):
            sequence.computed += new
            if plan.samples[row]:
                flight.sampling[row] = sequence, len(sequence.tokens)
                sequence.tokens.append(-1)
        return flight

    def _grow(self, slot: int, sequence: Sequence_, num_tokens: int) -> Iterable[BlockUpdate]:
        columns = -(-num_tokens // self.layout.block_size)
        for group, blocks in enumerate(sequence.blocks):
            start = len(blocks)
            fresh = [self.new_block() for _ in range(columns - start)]
            blocks.extend(fresh)
            if fresh:
                yield BlockUpdate(slot, group, start, fresh)

    def check(self, slot: int, entry: PositionLogprobs) -> None:
        """The last sampled token of `slot` and its whole distribution are those of a dense recomputation."""
        tokens = self.sequences[slot].tokens
        expected = self.model.dense(tokens[:-1])[-1].log_softmax(-1).cpu()
        got = torch.empty(VOCAB)
        got[torch.tensor(entry.token_ids)] = torch.tensor(entry.logprobs)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert entry.token_ids[0] == tokens[-1]


def make_driver(
    windows: Sequence[int | None] = (None, None),
    *,
    block_size: int = 4,
    page_size: int = 4,
    num_blocks: int = 400,
    num_host_blocks: int = 0,
    device: str = "cpu",
    launched: bool = False,
    backend: AttentionBackend | None = None,
) -> Driver:
    model = TinyModel(windows, device=device)
    groups = kv_groups(model.attention, torch.float32)
    layout = KVCacheLayout(groups, num_blocks, block_size, page_size, num_host_blocks=num_host_blocks)
    return Driver(model, layout, launched, backend or PagedAttention())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Handing tensors of this size to other threads takes longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def driver() -> Callable[..., Driver]:
    """(windows, block_size=, page_size=, launched=) → a driver with its own tiny model; `launched`: with the runner of
    GPUs, whatever the device."""
    return make_driver


class TinyModelPlugin:
    """Front door of the tiny model: layers from config.json's `windows`."""

    info = PluginInfo(summary="a tiny random model for tests")

    @staticmethod
    @hookimpl
    def llmkit_model(context: ModelContext) -> CausalLM:
        model = TinyModel(context.config.raw["windows"], context.config.vocab_size, context.device)
        context.attention_layers.extend(model.attention)
        return model


class PagedAttentionPlugin:
    """Front door of the tests' attention."""

    info = PluginInfo(summary="plain paged attention for tests")

    @staticmethod
    @hookimpl
    def llmkit_attention_backend() -> AttentionBackend:
        return PagedAttention()


@pytest.fixture
def tiny_model_plugin() -> type[TinyModelPlugin]:
    return TinyModelPlugin


@pytest.fixture
def paged_attention_plugin() -> type[PagedAttentionPlugin]:
    return PagedAttentionPlugin
