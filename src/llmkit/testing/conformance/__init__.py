"""The conformance kit: suites that hold any registered plugin against the contract of its kind.

`pytest --llmkit-conformance KIND:NAME` runs `common_suite` and the suite of that kind on a plugin. Suites are
ordinary pytest modules whose tests take the fixture `conformance`, a `llmkit.testing.conformance.target.Conformance`.
"""

from __future__ import annotations

from importlib.util import find_spec

COMMON_SUITE = "common_suite"


def suites_of(kind: str) -> tuple[str, ...]:
    """Names of the modules of this package that hold the checks for a kind: the common one, and its own if it has
    one."""
    own = f"{kind}_suite"
    return (COMMON_SUITE, own) if find_spec(f"{__name__}.{own}") else (COMMON_SUITE,)
