from __future__ import annotations

import numpy as np
import pytest
import torch

from llmkit.execution.block_table import BlockTable
from llmkit.execution.input_batch import InputBatch
from llmkit.execution.kv_tensors import KVTensors
from llmkit.execution.staging import StagingBuffer
from llmkit.kv_cache.layout import KVCacheLayout, KVGroup, KVSpec
from llmkit.mapped_memory import lazy_zeros
from llmkit.requests.message import EngineRequest
from llmkit.requests.sampling_params import SamplingParams
from llmkit.scheduling.plan import AddedRow, BlockUpdate, StepPlan

CPU = torch.device("cpu")


def layout(block_size: int = 4, page_size: int = 2, num_groups: int = 2) -> KVCacheLayout:
    groups = tuple(KVGroup(KVSpec(1, 4, torch.float32, None if g == 0 else 3), (g,)) for g in range(num_groups))
    return KVCacheLayout(groups, 50, block_size, page_size)


def row(slot: int, tokens: list[int], *block_ids: list[int]) -> AddedRow:
    request = EngineRequest(request_id="", prompt_token_ids=tokens, sampling_params=SamplingParams(), max_tokens=1)
    return AddedRow(slot, request, 0, 0, tokens, len(tokens), block_ids)


def plan(slots: list[int], computed: list[int], new: list[int], samples: list[bool]) -> StepPlan:
    ints = [np.array(x, dtype=np.int32) for x in (slots, computed, new)]
    return StepPlan(0, *ints, samples=np.array(samples))


def test_a_mixed_step_in_numbers():
    batch = InputBatch(layout(), max_num_seqs=4, max_model_len=20, device=CPU)
    batch.add(row(2, [10, 11, 12, 13, 14, 15], [3, 5], [4, 6]))
    batch.add(row(0, [20, 21, 22], [7], [8]))
    batch.update([BlockUpdate(2, 0, 2, [9]), BlockUpdate(2, 1, 2, [1])])
    inputs = batch.prepare(plan([2, 0], [4, 2], [2, 1], [False, True]))
    assert inputs.input_ids.tolist() == [14, 15, 22]
    assert inputs.positions.tolist() == [4, 5, 2]
    assert inputs.sampling_rows.tolist() == [1]
    assert inputs.logits_indices is not None
    assert inputs.logits_indices.tolist() == [2]
    assert inputs.sampled_positions.tolist() == [3]
    first, second = inputs.batches
    assert first.query_start_loc.tolist() == first.query_start_loc_np.tolist() == [0, 2, 3]
    assert first.seq_lens.tolist() == first.seq_lens_np.tolist() == [6, 3]
    assert (first.num_rows, first.num_tokens, first.max_query_len, first.max_seq_len) == (2, 3, 2, 6)
    assert first.block_table[0].tolist() == [6, 7, 10]
    assert first.block_table[1, :2].tolist() == [14, 15]
    assert first.slot_mapping.tolist() == [20, 21, 30]
    assert second.block_table[0].tolist() == [8, 9, 12]
    assert second.slot_mapping.tolist() == [24, 25, 34]
    assert first.block_table.dtype == torch.int32
    assert inputs.input_ids.dtype == inputs.positions.dtype == first.slot_mapping.dtype == torch.int64


@pytest.mark.parametrize("again", [False, True])
def test_many_sequences_that_get_a_block_are_written_as_one_after_the_other(again):
    """Among them one that gets two, one that begins anew; again: one that comes twice."""
    changes = [BlockUpdate(slot, slot % 2, 1 + slot % 2, [20 + slot]) for slot in range(20)]
    changes += [BlockUpdate(20, 0, 1, [4, 6]), BlockUpdate(21, 0, 0, [5])]
    changes += [BlockUpdate(2, 0, 2, [48])] if again else []
    together, apart = (InputBatch(layout(), max_num_seqs=22, max_model_len=20, device=CPU) for _ in range(2))
    for batch in (together, apart):
        for slot in range(22):
            batch.add(row(slot, [10, 11, 12], [slot], [slot + 10]))
    together.update(changes)
    for change in changes:
        apart.block_tables[change.group].write(change.slot, change.start, change.block_ids)
    for table, expected in zip(together.block_tables, apart.block_tables, strict=True):
        assert table.pages[:, :6].tolist() == expected.pages[:, :6].tolist()
        assert table.num_rewrites == expected.num_rewrites
    assert together.block_tables[0].num_rewrites == 1
    together.update([])


def test_a_decode_step_needs_no_gathering_of_rows():
    batch = InputBatch(layout(), max_num_seqs=4, max_model_len=20, device=CPU)
    batch.add(row(1, [10, 11], [3], [4]))
    batch.add(row(3, [20, 21, 22], [7], [8]))
    step = plan([3, 1], [2, 1], [1, 1], [True, True])
    inputs = batch.prepare(step)
    assert inputs.input_ids.tolist() == [22, 11]
    assert inputs.logits_indices is None
    batch.record(step, inputs.sampling_rows, np.array([77, 88]))
    assert batch.token_ids[3, :4].tolist() == [20, 21, 22, 77]
    assert batch.token_ids[1, :3].tolist() == [10, 11, 88]


def test_untouched_rows_take_no_memory():
    psutil = pytest.importorskip("psutil")
    before = psutil.Process().memory_info().rss
    batch = InputBatch(layout(), max_num_seqs=2000, max_model_len=100_000, device=CPU)
    batch.add(row(1999, [10, 11], [3], [4]))
    assert batch.token_ids.nbytes > 700e6
    assert psutil.Process().memory_info().rss - before < 50e6


def test_memory_is_lazy_also_where_the_heap_has_room():
    """A freed stretch of heap must not be taken for it: it would be cleared by hand, and so committed."""
    psutil = pytest.importorskip("psutil")
    pieces = [torch.empty(2**20, dtype=torch.uint8).fill_(1) for _ in range(200)]
    keep = pieces[::50]
    del pieces
    before = psutil.Process().memory_info().rss
    memory = lazy_zeros((2000, 50_000), np.int32)
    assert psutil.Process().memory_info().rss - before < 20e6
    memory[7, 3] = 5
    assert memory[7].sum() == memory[6:9].sum() == 5
    assert memory.flags.writeable
    assert len(keep) == 4


def test_block_table_in_pages():
    table = BlockTable(2, 4, block_size=6, page_size=2)
    table.write(1, 1, [5, 2])
    assert table.pages[1, 3:9].tolist() == [15, 16, 17, 6, 7, 8]
    slots = table.slot_mapping(np.array([1, 1], dtype=np.int32), np.array([6, 17], dtype=np.int32))
    assert slots.tolist() == [30, 17]


def test_staging_hands_out_aligned_views_and_grows():
    staging = StagingBuffer(CPU)
    for size in (3, 50_000, 3):
        host = staging.layout({"a": (np.int32, (size,)), "b": (np.int64, (2, size)), "empty": (np.int32, (0,))})
        host["a"][:], host["b"][:] = 1, 2
        sent = staging.send()
        assert sent["a"].tolist() == [1] * size
        assert sent["b"].shape == (2, size)
        assert sent["b"].sum() == 4 * size
        assert sent["b"].data_ptr() % 64 == sent["a"].data_ptr() % 64


class Shapes:
    """Only the cache shape of a backend."""

    @staticmethod
    def kv_shape(num_pages: int, page_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return (num_pages, 2, num_kv_heads, page_size, head_size)


def test_groups_share_storage_block_by_block():
    full, sliding = KVSpec(2, 4, torch.float32), KVSpec(1, 8, torch.float32, 3)
    shared = KVCacheLayout((KVGroup(full, (0, 2)), KVGroup(sliding, (1,))), 5, 4, 2)
    kv = KVTensors(shared, Shapes(), CPU)
    assert [tuple(layer.shape) for layer in kv.layers] == [(10, 2, 2, 2, 4), (10, 2, 1, 2, 8), (10, 2, 2, 2, 4)]
    kv.layers[0][4:6] = 1.0
    assert kv.layers[1][4:6].eq(1).all()
    assert kv.layers[1].sum() == kv.layers[0].sum()
    assert kv.layers[2].sum() == 0
    kv.copy_blocks([(2, 4), (2, 1)])
    assert kv.layers[0][8:10].eq(1).all()
    assert kv.layers[0][2:4].eq(1).all()
    assert kv.layers[0][6:8].eq(0).all()
    assert kv.nbytes == 2 * 5 * shared.groups[0].spec.bytes_per_token * 4


def test_untouched_blocks_take_no_memory():
    psutil = pytest.importorskip("psutil")
    before = psutil.Process().memory_info().rss
    spec = KVSpec(8, 64, torch.float32)
    kv = KVTensors(KVCacheLayout((KVGroup(spec, (0, 1)),), 10_000, 16, 16), Shapes(), CPU)
    kv.layers[1][3] = 1.0
    assert kv.nbytes > 1e9
    assert psutil.Process().memory_info().rss - before < 50e6
