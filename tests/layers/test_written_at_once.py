"""Keys and values written by the kernel that norms and rotates them, where kernel table and attention both allow it; or
all of it left to attention, where that takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmkit.hookspecs.kernels import HeadNorms
from llmkit.layers.config import LayerOptions
from llmkit.layers.context import ForwardContext, ModelContext
from llmkit.layers.decoder import DecoderForCausalLM
from llmkit.testing.paged_attention import PagedPool
from llmkit_attention.torch_backend import TorchAttention
from llmkit_kernels.torch_table import TorchKernels

IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2])


class WrittenByOthers(TorchAttention):
    def slots(self, metadata: Any) -> torch.Tensor:
        return metadata.pages * metadata.page_size + metadata.offsets

    def attend(self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any) -> torch.Tensor:
        key, value = (kv_cache[metadata.pages, part, :, metadata.offsets] for part in (0, 1))
        return self.forward(layer, query, key, value, kv_cache, metadata)


class TakesWhatIsProjected(WrittenByOthers):
    """Steps of one row, as if others were too many for it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[HeadNorms | None] = []

    def attend_projected(self, layer, query, key, value, rotation, kv_cache, metadata) -> torch.Tensor | None:
        if len(query) > 3:
            return None
        query, key, value = query.clone(), key.clone(), value.clone()
        slots = self.slots(metadata)
        OneKernel().rotary_and_write(
            rotation.positions, query, key, value, rotation.cos_sin, rotation.norms, kv_cache, slots
        )
        self.norms.append(rotation.norms)
        return self.attend(layer, query.view(len(query), -1, layer.head_size), kv_cache, metadata)


class OneKernel(TorchKernels):
    def __init__(self, takes: bool = True) -> None:
        self.takes, self.norms = takes, []

    def rotary_and_write(self, positions, query, key, value, cos_sin, norms, kv_cache, slots) -> bool:
        self.norms.append(norms)
        if not self.takes:
            return False
        _, _, heads, page_size, size = kv_cache.shape
        if norms is not None:
            for rows, weight in ((query, norms.query), (key, norms.key)):
                rows.copy_(self.rms_norm(rows.view(len(rows), -1, size), weight, norms.eps).view(len(rows), -1))
        self.rotary(positions, query, key, cos_sin, size)
        for part, rows in enumerate((key, value)):
            kv_cache[slots // page_size, part, :, slots % page_size] = rows.view(-1, heads, size)
        return True


def logits(context: ModelContext, model: DecoderForCausalLM, backend: TorchAttention) -> torch.Tensor:
    pool = PagedPool(8, 4)
    caches = pool.caches(backend, context.attention_layers, torch.float32)
    outputs = []
    for start, stop in ((0, 4), (4, 7)):
        metadata = backend.plan(pool.step([(0, stop - start)]))
        forward = ForwardContext(backend, [metadata] * len(caches), caches)
        outputs.append(model.logits(model(IDS[start:stop], torch.arange(start, stop), forward)))
    return torch.cat(outputs)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_the_layers_compute_the_same(make_context: Callable[..., ModelContext], random_tensors, qk_norm) -> None:
    def built(kernels: TorchKernels) -> tuple[ModelContext, DecoderForCausalLM]:
        context = make_context(kernels=kernels)
        model = DecoderForCausalLM(context, lambda *_: LayerOptions(qk_norm=qk_norm))
        model.load_weights(random_tensors(model).items())
        return context, model

    expected = logits(*built(TorchKernels()), TorchAttention())
    for kernels, backend, calls in (
        (OneKernel(), WrittenByOthers(), 6),
        (OneKernel(takes=False), WrittenByOthers(), 6),
        (OneKernel(), TorchAttention(), 0),
    ):
        torch.testing.assert_close(logits(*built(kernels), backend), expected, rtol=1e-5, atol=1e-6)
        assert len(kernels.norms) == calls
        assert all(isinstance(norms, HeadNorms) == qk_norm for norms in kernels.norms)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_attention_may_take_what_is_projected(
    make_context: Callable[..., ModelContext], random_tensors, qk_norm
) -> None:
    def built() -> tuple[ModelContext, DecoderForCausalLM]:
        context = make_context(kernels=OneKernel())
        model = DecoderForCausalLM(context, lambda *_: LayerOptions(qk_norm=qk_norm))
        model.load_weights(random_tensors(model).items())
        return context, model

    context, model = built()
    backend = TakesWhatIsProjected()
    expected = logits(*built(), TorchAttention())
    torch.testing.assert_close(logits(context, model, backend), expected, rtol=1e-5, atol=1e-6)
    layers = len(context.attention_layers)
    assert len(backend.norms) == layers, "asked once a layer, and what it gave back went on"
    assert len(context.kernels.norms) == layers, "what it did not take went the other way"
    assert all(isinstance(norms, HeadNorms) == qk_norm for norms in backend.norms)
