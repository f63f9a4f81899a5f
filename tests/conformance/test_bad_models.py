"""Models with one thing wrong each, and the checks of the model suite that must notice it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.layers.attention import SelfAttention
from llmkit.layers.config import DecoderConfig, LayerOptions
from llmkit.layers.decoder import DecoderForCausalLM
from llmkit.layers.moe import Router
from llmkit.registry import Registry, detect_environment
from llmkit.testing.conformance import model_suite
from llmkit.testing.conformance.model_examples import shrunk_config
from llmkit.testing.conformance.model_suite import Subject
from llmkit.testing.conformance.target import Conformance

REFERENCE = "test_logits_are_those_of_transformers"
Build = Callable[[Any], Any]


def family(name: str) -> ModuleType:
    return __import__(f"llmkit_models.{name}", fromlist=["x"])


def plain(context: Any) -> Any:
    return family("llama").llmkit_model(context)


def wrong_rope(context: Any) -> Any:
    context.config = replace(context.config, rope=replace(context.config.rope, theta=context.config.rope.theta * 2))
    return plain(context)


def window_off_by_one(context: Any) -> Any:
    def options(config: DecoderConfig, _index: int) -> LayerOptions:
        return LayerOptions(sliding_window=(config.sliding_window or 0) + 1)

    return DecoderForCausalLM(context, options)


def no_renormalising(context: Any) -> Any:
    model = family("mixtral").llmkit_model(context)
    for module in model.modules():
        if isinstance(module, Router):
            module.renormalise = False
    return model


def leaky(context: Any) -> Any:
    """Every token gets something of the one before it, whoever's that is."""
    model = plain(context)
    forward = model.forward

    def mixed(input_ids: Any, positions: Any, step: Any) -> Any:
        hidden = forward(input_ids, positions, step)
        return hidden + 0.01 * hidden.roll(1, dims=0)

    model.forward = mixed
    return model


def positions_from_the_step(context: Any) -> Any:
    """Takes a token's place in the step for its position."""
    model = plain(context)
    forward = model.forward
    model.forward = lambda ids, _positions, step: forward(ids, torch.arange(len(ids)), step)
    return model


def short_table(context: Any) -> Any:
    """Has a table of rotary embeddings for a hundred positions."""
    model = plain(context)
    forward = model.forward
    model.forward = lambda ids, positions, step: forward(ids, positions.clamp(max=99), step)
    return model


def writes_positions(context: Any) -> Any:
    """Counts the positions that it was given on to the next step's."""
    model = plain(context)
    forward = model.forward

    def counted(input_ids: Any, positions: Any, step: Any) -> Any:
        hidden = forward(input_ids, positions, step)
        positions.add_(1)
        return hidden

    model.forward = counted
    return model


def wrong_rows(context: Any) -> Any:
    """Leaves out the rows that are wanted."""
    model = plain(context)
    forward = model.forward

    def shifted(input_ids: Any, positions: Any, step: Any) -> Any:
        if step.output_rows is not None:
            step.output_rows = (step.output_rows + 1) % len(input_ids)
        return forward(input_ids, positions, step)

    model.forward = shifted
    return model


def forgets_a_weight(context: Any) -> Any:
    """Takes the norms of query heads and does not use them."""
    model = family("qwen3").llmkit_model(context)
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.q_norm.forward = lambda x: x
    return model


def tolerant(context: Any) -> Any:
    """Overlooks tensors that it does not know."""
    model = plain(context)
    load, known = model.load_weights, model.weight_shapes().keys()
    model.load_weights = lambda tensors: load((name, tensor) for name, tensor in tensors if name in known)
    return model


def miscounts(context: Any) -> Any:
    model = plain(context)
    model.parameter_bytes = lambda: 1000
    return model


def overflows(context: Any) -> Any:
    """Logits that half precision cannot hold on the way."""
    model = plain(context)
    logits = model.logits
    model.logits = lambda hidden: logits(hidden * 1e5).float() / 1e5
    return model


BAD: dict[str, tuple[str, Build, set[str]]] = {
    "wrong rope": ("LlamaForCausalLM", wrong_rope, {REFERENCE}),
    "window off by one": ("MistralForCausalLM", window_off_by_one, {REFERENCE}),
    "weights of experts do not add up": ("MixtralForCausalLM", no_renormalising, {REFERENCE}),
    "rows mix": ("LlamaForCausalLM", leaky, {REFERENCE, "test_the_batch_does_not_matter"}),
    "positions": ("LlamaForCausalLM", positions_from_the_step, {"test_chunks_do_not_matter"}),
    "cached prefix": ("LlamaForCausalLM", positions_from_the_step, {"test_a_cached_prefix_does_not_matter"}),
    "a short table": ("LlamaForCausalLM", short_table, {REFERENCE}),
    "writes its input": ("LlamaForCausalLM", writes_positions, {REFERENCE}),
    "wrong rows": ("LlamaForCausalLM", wrong_rows, {"test_rows_that_nobody_reads_may_be_left_out"}),
    "an idle weight": ("Qwen3ForCausalLM", forgets_a_weight, {REFERENCE, "test_every_tensor_is_used"}),
    "strays": ("LlamaForCausalLM", tolerant, {"test_a_tensor_too_many_is_named"}),
    "bytes": ("LlamaForCausalLM", miscounts, {"test_what_it_asks_for_is_what_it_takes"}),
    "overflow": ("LlamaForCausalLM", overflows, {"test_half_precision"}),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def on_trial(architecture: str, build: Build) -> Subject:
    """A small model of the architecture, built by `build`."""

    class Door:
        info = PluginInfo("a model on trial")

        @staticmethod
        @hookimpl
        def llmkit_model_example() -> dict[str, Any]:
            example = shrunk_config(architecture)
            assert example is not None
            return example

        @staticmethod
        @hookimpl
        def llmkit_model(context: Any) -> Any:
            return build(context)

    registry = Registry.discover()
    plugin = registry.register("model", "on-trial", Door)
    return Subject(Conformance("model", "on-trial", registry, detect_environment("cpu"), plugin))


@pytest.mark.parametrize("case", BAD)
def test_it_is_noticed(case: str) -> None:
    architecture, build, checks = BAD[case]
    trial = on_trial(architecture, build)
    for check in checks:
        function = getattr(model_suite, check)
        arguments = (torch.float16,) if check == "test_half_precision" else ()
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            function(trial, *arguments)
