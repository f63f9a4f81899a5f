"""What is asked of a model architecture."""

from __future__ import annotations

import pytest

from llmkit.errors import ModelError
from llmkit.testing.conformance.arguments import small_context
from llmkit.testing.conformance.target import Conformance


def test_missing_weights_are_named(conformance: Conformance) -> None:
    """A model file without a single tensor is refused with the names of those that are missing."""
    context = small_context(conformance.registry, conformance.environment, conformance.name)
    model = conformance.create(context=context)
    assert context.attention_layers, "the model has no attention layers from llmkit.layers"
    with pytest.raises(ModelError, match="weight"):
        model.load_weights([])
