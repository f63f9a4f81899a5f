"""What is asked of a scheduling policy."""

from __future__ import annotations

from llmkit.testing.conformance.target import Conformance
from llmkit.testing.scheduling import check_policy


def test_random_load_is_answered_right(conformance: Conformance) -> None:
    """Under random load in a tiny cache nothing is lost, the budget holds, and the core never has to step in."""
    check_policy(conformance.create)
