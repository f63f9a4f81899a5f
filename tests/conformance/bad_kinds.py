"""Wrong implementations that need imports of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from llmkit.hookspecs.attention import Support
from llmkit.hookspecs.connector import TransferReport
from llmkit.hookspecs.structured import CompiledGrammar, Grammar, GrammarCompiler
from llmkit.testing.memory_connector import MemoryConnector, MemoryStore, MemoryWorker
from llmkit_attention.torch_backend import TorchAttention
from llmkit_structured.xgrammar_grammar import XGrammarCompiler


class OneTooFarAttention(TorchAttention):
    """Every query but a row's last sees one key too many."""

    def forward(self, layer, query, key, value, kv_cache, metadata):
        right = super().forward(layer, query, key, value, kv_cache, metadata)
        output = super().forward(layer, query.roll(1, 0), key, value, kv_cache, metadata).roll(-1, 0)
        last = torch.tensor([row.stop - 1 for row in metadata.rows])
        output[last] = right[last]
        return output


class UntidyAttention(TorchAttention):
    """A token without a slot is written to the last page."""

    def plan(self, batch):
        plan = super().plan(batch)
        slots = batch.slot_mapping
        return replace(plan, tokens=None, pages=slots.div(batch.page_size, rounding_mode="floor"),
                       offsets=slots % batch.page_size)  # fmt: skip


class ClearingAttention(TorchAttention):
    """Writes zeros into a page of somebody else."""

    def forward(self, layer, query, key, value, kv_cache, metadata):
        output = super().forward(layer, query, key, value, kv_cache, metadata)
        kv_cache[-1] = 0
        return output


class CrowdedAttention(TorchAttention):
    """Has room for 256 rows."""

    def forward(self, layer, query, key, value, kv_cache, metadata):
        output = super().forward(layer, query, key, value, kv_cache, metadata)
        output[[row.start for row in metadata.rows[256:]]] = 0
        return output


class ShortAttention(TorchAttention):
    """Has room for 8192 keys of a row."""

    def forward(self, layer, query, key, value, kv_cache, metadata):
        output = super().forward(layer, query, key, value, kv_cache, metadata)
        for row in metadata.rows:
            if row.length > 8192:
                output[row.start : row.stop] = 0
        return output


class LeakyAttention(TorchAttention):
    """Weighs what lies beyond a row with zero instead of leaving it out."""

    def forward(self, layer, query, key, value, kv_cache, metadata):
        output = super().forward(layer, query, key, value, kv_cache, metadata)
        return output + 0 * kv_cache.float().sum().to(output.dtype)


class MuteAttention(TorchAttention):
    """Does not say why it refuses a layer."""

    def support(self, query):
        return Support(reasons=("",)) if super().support(query).reasons else Support()


class RigidAttention(TorchAttention):
    """Says that its plans serve steps of any lengths, and keeps to those of the plan."""

    graph_safe = True


class _Anything(Grammar):
    """Allows every token with a text, whatever was asked for."""

    def __init__(self, vocabulary):
        self._vocabulary = vocabulary

    def fill_bitmask(self, row):
        row[:] = 0
        for token_id, text in enumerate(self._vocabulary.tokens):
            if text:
                row.view("uint32")[token_id // 32] |= 1 << token_id % 32

    def accept(self, token_id):  # noqa: ARG002
        return True

    def is_accepting(self):
        return True

    def validate(self, token_ids):
        return len(token_ids)

    def rollback(self, num_tokens):
        pass


class _Compiled(CompiledGrammar):
    def __init__(self, vocabulary):
        self._vocabulary = vocabulary

    def start(self):
        return _Anything(self._vocabulary)


class LenientCompiler(GrammarCompiler):
    def __init__(self, vocabulary):
        self._vocabulary = vocabulary

    def problems(self, request):  # noqa: ARG002
        return []

    def compile(self, request):  # noqa: ARG002
        return b""

    def load(self, request, compiled):  # noqa: ARG002
        return _Compiled(self._vocabulary)


class ForgetfulCompiler(GrammarCompiler):
    """Keeps what it has compiled in its own process; what it returns is only a number."""

    compiled: ClassVar[list[bytes]] = []

    def __init__(self, vocabulary):
        self._right = XGrammarCompiler(vocabulary)

    def problems(self, request):
        return self._right.problems(request)

    def compile(self, request):
        self.compiled.append(self._right.compile(request))
        return str(len(self.compiled) - 1).encode()

    def load(self, request, compiled):
        return self._right.load(request, self.compiled[int(compiled)])


class _TalkativeWorker(MemoryWorker):
    """Says of a block that nobody asked for that its load has failed."""

    def report(self):
        report = super().report()
        return TransferReport(report.loaded, report.released, report.failed_blocks | {1})


class TalkativeConnector(MemoryConnector):
    def __init__(self):
        super().__init__(MemoryStore())

    def worker_half(self, context):
        return _TalkativeWorker(self._store, context, 0)
