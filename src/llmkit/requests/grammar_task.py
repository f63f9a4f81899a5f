"""The constraint of a request as the engine core gets it."""

from __future__ import annotations

import msgspec

from llmkit.hookspecs.structured import GrammarRequest


class GrammarTask(msgspec.Struct, frozen=True, gc=False):
    """A grammar to be compiled.

    backends: the grammar engines to try, by choice, best first. judged: at the door, where the request was found to be
    well-formed, and the first engine to have no problems with it; the others have not been asked yet. What is too large
    for that is judged where it is compiled.
    """

    request: GrammarRequest
    backends: tuple[str, ...]
    judged: bool = True
