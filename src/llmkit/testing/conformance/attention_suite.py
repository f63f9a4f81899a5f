"""What is asked of an attention backend."""

from __future__ import annotations

from llmkit.testing.attention import check_attention_backend
from llmkit.testing.conformance.target import Conformance


def test_it_agrees_with_the_definition(conformance: Conformance) -> None:
    """On every kind of layer that it does not refuse: mixed steps, page sizes, windows, soft caps."""
    check_attention_backend(
        conformance.create(),
        device=conformance.device,
        compute_capability=conformance.environment.compute_capability,
    )
