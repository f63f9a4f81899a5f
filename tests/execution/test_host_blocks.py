"""KV blocks that are copied to the host and back."""

from __future__ import annotations

import pytest
import torch

from llmkit.execution import host_blocks
from llmkit.execution.host_blocks import HostBlocks

PROMPT = [5, 17, 3, 3, 21, 8, 30, 11, 2, 14, 9]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
    ),
]


@pytest.mark.parametrize("staged_bytes", [host_blocks.STAGED_BYTES, 1000, 1])
@pytest.mark.parametrize("device", DEVICES)
def test_every_block_comes_back_where_it_is_wanted(device, staged_bytes, monkeypatch):
    monkeypatch.setattr(host_blocks, "STAGED_BYTES", staged_bytes)
    draw = torch.Generator().manual_seed(1)
    tensors = [torch.randint(0, 255, (40, 96), dtype=torch.uint8, generator=draw).to(device) for _ in range(3)]
    before = [tensor.clone() for tensor in tensors]
    host = HostBlocks(20, 96, 3, torch.device(device))
    out = list(zip([7, 3, 39, 12, 5, 6, 1], [0, 4, 1, 19, 2, 11, 12], strict=True))
    host.swap_out(tensors, out)
    for tensor in tensors:
        tensor.zero_()
    back = [(block + 1 if block < 39 else 20, h) for block, h in out]
    host.swap_in(tensors, back[::-1])
    for tensor, old in zip(tensors, before, strict=True):
        for (block, _), (target, _) in zip(out, back, strict=True):
            assert torch.equal(tensor[target], old[block])
        assert int(tensor.any(1).sum()) == len(out)


@pytest.mark.parametrize("device", DEVICES)
def test_a_swapped_sequence_goes_on_although_another_has_taken_its_blocks(driver, device):
    d = driver((6, None), num_host_blocks=8, device=device)
    d.add(0, PROMPT)
    d.step({0: len(PROMPT)})
    state = d.remove(0)
    held = [block for table in state.blocks for block in table]
    d.swaps_out = [(block, host) for host, block in enumerate(held)]
    d.add(1, PROMPT[::-1], blocks=[list(table) for table in state.blocks])  # in the same step
    result = d.step({1: len(PROMPT)})
    d.check(1, result.logprobs[0])
    tables = [[d.new_block() for _ in table] for table in state.blocks]
    back = [block for table in tables for block in table]
    d.swaps_in = [(block, host) for host, block in enumerate(back)]
    d.add(0, PROMPT, state.tokens[len(PROMPT) :], computed=state.computed, blocks=tables)
    before = len(d.model.steps)
    result = d.step({0: 1, 1: 1})
    assert d.model.steps[before:] == [2]
    d.check(0, result.logprobs[0])
    d.check(1, result.logprobs[1])


def test_untouched_host_blocks_take_no_memory():
    psutil = pytest.importorskip("psutil")
    before = psutil.Process().memory_info().rss
    host = HostBlocks(10_000, 65_536, 2, torch.device("cpu"))
    tensors = [torch.ones(4, 65_536, dtype=torch.uint8) for _ in range(2)]
    host.swap_out(tensors, [(1, 9_000), (2, 5)])
    assert psutil.Process().memory_info().rss - before < 50e6
