"""How a schema that an engine cannot express is refused."""

from __future__ import annotations

from typing import NoReturn


class UnsupportedSchema(ValueError):
    """The schema is malformed, or says something that has no exact counterpart. place: a JSON pointer."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{reason} (at {place})")
        self.place = place
        self.reason = reason


def refuse(place: str, reason: str) -> NoReturn:
    """Raise UnsupportedSchema."""
    raise UnsupportedSchema(place, reason)
