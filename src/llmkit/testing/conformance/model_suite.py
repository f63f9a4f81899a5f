"""What is asked of a model architecture: transformers' logits, the same in any pieces and company, and an answer to
every tensor that does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from typing import Any, cast

import pytest
import torch

from llmkit.errors import ModelError
from llmkit.execution.building import attention_queries, judge_of
from llmkit.hookspecs.attention import AttentionBackend
from llmkit.layers.causal_lm import CausalLM
from llmkit.layers.context import ModelContext
from llmkit.testing.conformance.model_examples import checkpoint_of, context_for, example_config, reference_model
from llmkit.testing.conformance.target import Conformance
from llmkit.testing.models import ModelTrial, relative_error

EXACT = 2e-4
"""Largest difference in float32 that another order of the same sums explains, as a share of the largest logit."""
LONG = 150
"""Tokens of the longest sequence, if the model and its windows allow and ask for no more."""
# Half precision: cosine of a token's logits to those in float32, the median of a sequence's. Small random models make
# much of every rounding, and one that chooses experts may choose others for a token that is between two.
SIMILAR = {torch.bfloat16: 0.98, torch.float16: 0.999}

Tensors = dict[str, torch.Tensor]


class Subject:
    """A small model of the plugin on trial, built and loaded when it is first asked for."""

    def __init__(self, conformance: Conformance) -> None:
        self.conformance = conformance
        self.loaded = cache(self._loaded)

    @cached_property
    def raw(self) -> dict[str, Any]:
        return example_config(self.conformance.plugin)

    @cached_property
    def reference(self) -> Any:
        """The model in transformers, None if it has no such architecture."""
        return reference_model(self.raw)

    @cached_property
    def tensors(self) -> Tensors:
        """Weights under checkpoint names: those of the reference, else made up as the model asks for them."""
        if self.reference is not None:
            return checkpoint_of(self.reference)
        draw = torch.Generator().manual_seed(0)
        shapes = self.build()[0].weight_shapes()
        noise = {name: 0.3 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}
        return {name: 1 + tensor if "norm" in name else tensor for name, tensor in noise.items()}

    def build(self, dtype: torch.dtype = torch.float32, device: str | None = None) -> tuple[CausalLM, ModelContext]:
        """A model without weights."""
        c = self.conformance
        context = context_for(self.raw, c.plugin, c.registry, c.environment, dtype=dtype, device=device)
        return c.create(context=context), context

    def _loaded(self, dtype: torch.dtype) -> tuple[CausalLM, ModelContext, AttentionBackend]:
        model, context = self.build(dtype)
        model.load_weights((name, tensor.clone()) for name, tensor in self.tensors.items())
        environment = self.conformance.environment
        queries = attention_queries(
            context.attention_layers, environment.device_type, environment.compute_capability, dtype, dtype
        )
        create = self.conformance.registry.create
        backend = cast("AttentionBackend", create("attention", "auto", environment, judge=judge_of(queries)))
        return model.eval(), context, backend

    def trial(self, dtype: torch.dtype = torch.float32) -> ModelTrial:
        """The loaded model with an empty cache."""
        model, context, backend = self.loaded(dtype)
        page_size = min(backend.page_sizes())
        return ModelTrial(
            model,
            context.attention_layers,
            backend,
            page_size=page_size,
            num_pages=1024 // page_size + 32,
            dtype=dtype,
            device=self.conformance.device,
        )

    @cached_property
    def sequences(self) -> dict[int, torch.Tensor]:
        """Token ids of three sequences; the first goes on well beyond every window, and beyond what tables of positions
        are made for by mistake."""
        _, context, _ = self.loaded(torch.float32)
        windows = [layer.sliding_window for layer in context.attention_layers if layer.sliding_window]
        longest = min(max(LONG, *(3 * window + 7 for window in windows), 0), context.config.max_position_embeddings)
        draw = torch.Generator().manual_seed(2)
        lengths = {0: longest, 1: min(23, longest), 2: min(9, longest)}
        return {s: torch.randint(0, context.config.vocab_size, (n,), generator=draw) for s, n in lengths.items()}

    @cached_property
    def whole(self) -> dict[int, torch.Tensor]:
        """Logits of each sequence, alone and in one pass."""
        return {s: self.trial().step({s: ids})[s] for s, ids in self.sequences.items()}


@pytest.fixture(scope="module")
def subject(conformance: Conformance) -> Iterator[Subject]:
    # Models as small as these gain nothing from threads, which wait for one another on a busy machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Subject(conformance)
    torch.set_num_threads(threads)


def worst(actual: dict[int, torch.Tensor], expected: dict[int, torch.Tensor]) -> float:
    return max(relative_error(actual[s], expected[s]) for s in expected)


def test_logits_are_those_of_transformers(subject: Subject) -> None:
    """On sequences shorter and longer than every sliding window."""
    if subject.reference is None:
        pytest.skip(f"transformers has no {subject.raw['architectures']} to compare with")
    for s, ids in subject.sequences.items():
        with torch.inference_mode():
            expected = subject.reference(ids[None], use_cache=False).logits[0].float()
        error = relative_error(subject.whole[s], expected)
        assert error < EXACT, f"logits of {len(ids)} tokens differ by {error:.1e} of the largest"


def test_the_batch_does_not_matter(subject: Subject) -> None:
    """A sequence in company has the logits that it has alone."""
    order = (1, 0, 2)
    together = subject.trial().step({s: subject.sequences[s] for s in order})
    error = worst(together, subject.whole)
    assert error < EXACT, f"in company a sequence's logits differ by {error:.1e} of the largest from those alone"


def test_chunks_do_not_matter(subject: Subject) -> None:
    """Prompts in pieces, mixed with single tokens of others, as the scheduler deals them out."""
    left = {s: len(ids) for s, ids in subject.sequences.items()}
    chunks: list[dict[int, int]] = []
    for sizes in ((10, 5, 0), (13, 1, 7), (1, 1, 1), (1, 9, 1)):
        taken = {s: min(n, left[s]) for s, n in enumerate(sizes) if min(n, left[s])}
        left = {s: n - taken.get(s, 0) for s, n in left.items()}
        chunks.append(taken)
    chunks.append({s: n for s, n in left.items() if n})
    pieces = subject.trial().run(subject.sequences, [chunk for chunk in chunks if chunk])
    error = worst(pieces, subject.whole)
    assert error < EXACT, f"in chunks a sequence's logits differ by {error:.1e} of the largest from those in one pass"


def test_a_cached_prefix_does_not_matter(subject: Subject) -> None:
    """A sequence that begins with pages that another one has filled goes on as if it had filled them itself."""
    trial, ids = subject.trial(), subject.sequences[0]
    trial.step({0: ids})
    size = trial.pool.page_size
    pages = (len(ids) - 1) // size
    assert pages, "the example is too short to fill a page"
    trial.share(0, 5, pages)
    rest = trial.step({5: ids[pages * size :]})[5]
    error = relative_error(rest, subject.whole[0][pages * size :])
    assert error < EXACT, f"behind a cached prefix logits differ by {error:.1e} of the largest"


def test_rows_that_nobody_reads_may_be_left_out(subject: Subject) -> None:
    """`ForwardContext.output_rows`: those that are wanted are right, whether the others come along or not."""
    total = sum(len(ids) for ids in subject.sequences.values())
    rows = torch.tensor([0, total // 2, total - 1])
    logits = subject.trial().logits(subject.sequences, rows.to(subject.conformance.device))
    expected = torch.cat(list(subject.whole.values()))[rows]
    error = relative_error(logits if len(logits) == len(rows) else logits[rows], expected)
    assert error < EXACT, f"the rows that are wanted have other logits: {error:.1e} of the largest apart"


@pytest.mark.parametrize("dtype", SIMILAR, ids=str)
def test_half_precision(subject: Subject, dtype: torch.dtype) -> None:
    logits = subject.trial(dtype).step(subject.sequences)
    for s, expected in subject.whole.items():
        assert logits[s].isfinite().all(), f"logits in {dtype} are not finite"
        cosine = torch.cosine_similarity(logits[s].float(), expected.float(), dim=-1).median().item()
        assert cosine > SIMILAR[dtype], f"logits in {dtype} point elsewhere than in float32: cosine {cosine:.3f}"


def refused(subject: Subject, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The message with which these tensors are refused."""
    model, _ = subject.build()
    with pytest.raises(ModelError) as caught:
        model.load_weights(tensors)
    return caught.value.message


def test_missing_weights_are_named(subject: Subject) -> None:
    """A model file without a single tensor is refused with the names of those that are missing, and so is one that
    lacks the last."""
    _, context = subject.build()
    assert context.attention_layers, "the model has no attention layers from llmkit.layers"
    assert "weight" in refused(subject, [])
    *most, last = subject.tensors.items()
    message = refused(subject, most)
    assert _parts_of(last[0]) & _words(message), f"the lack of {last[0]} is not explained: {message}"


def test_a_tensor_too_many_is_named(subject: Subject) -> None:
    stray = "model.layers.0.no_such_projection.weight"
    assert stray in refused(subject, [*subject.tensors.items(), (stray, torch.zeros(3))])


def test_a_misshapen_tensor_is_named(subject: Subject) -> None:
    name, tensor = max(subject.tensors.items(), key=lambda item: item[1].numel())
    grown = torch.cat((tensor, tensor[:1]))
    message = refused(subject, (subject.tensors | {name: grown}).items())
    assert _parts_of(name) & _words(message), f"the shape of {name} is not explained: {message}"


def test_every_tensor_is_used(subject: Subject) -> None:
    """Logits change with each tensor of the first layer and each that belongs to none: nothing is taken and forgotten.

    Single experts are passed over, as no token need go through one."""
    other = Subject(subject.conformance)  # its model is loaded again and again
    other.tensors = subject.tensors
    ids = {0: subject.sequences[0][:16]}
    before = other.trial().step(ids)[0]
    idle = []
    for name, tensor in subject.tensors.items():
        if [part for part in name.split(".") if part.isdigit()] not in ([], ["0"]):
            continue
        changed = subject.tensors | {name: tensor + 0.5 * torch.randn(tensor.shape)}
        other.loaded(torch.float32)[0].load_weights(changed.items())
        if torch.equal(other.trial().step(ids)[0], before):
            idle.append(name)
    assert not idle, f"{', '.join(idle)} make no difference"


def test_what_it_asks_for_is_what_it_takes(subject: Subject) -> None:
    """`weight_shapes`, by which weights are made up, and the bytes that the memory plan reckons with."""
    model, _ = subject.build()
    shapes = model.weight_shapes()
    expected = 4 * sum(torch.Size(shape).numel() for shape in shapes.values())
    assert model.parameter_bytes() == pytest.approx(expected, rel=0.02)
    model.load_weights((name, torch.zeros(shape)) for name, shape in shapes.items())


def test_a_dry_run_takes_no_memory(subject: Subject) -> None:
    """On the meta device the model is built as anywhere, and knows what it will take."""
    here, context = subject.build()
    there, meta = subject.build(device="meta")
    assert there.parameter_bytes() == here.parameter_bytes()
    assert meta.attention_layers == context.attention_layers
    places = {tensor.device.type for tensor in (*there.parameters(), *there.buffers())}
    assert places <= {"meta"}, f"a model on the meta device has tensors on {', '.join(places)}"


def _parts_of(name: str) -> set[str]:
    """A tensor's name and what could stand for it: the tensor that it is merged into is called by its module."""
    return {name, name.removesuffix(".weight"), name.rpartition(".")[0].rpartition(".")[0]}


def _words(message: str) -> set[str]:
    words = {word.strip(".,;:()") for word in message.split()}
    return words | {word.rpartition(".")[0] for word in words}
