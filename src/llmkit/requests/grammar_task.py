"""The constraint of a request as the engine core gets it."""

from __future__ import annotations

import msgspec

from llmkit.hookspecs.structured import GrammarRequest


class GrammarTask(msgspec.Struct, frozen=True, gc=False):
    """A grammar to be compiled, checked at the door.

    backends: the grammar engines to try, by choice, best first; the first has no problems with the request, the others
    have not been asked yet.
    """

    request: GrammarRequest
    backends: tuple[str, ...]
