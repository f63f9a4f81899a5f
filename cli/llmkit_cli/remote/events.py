"""Server-sent events, read from bytes as they arrive."""

from __future__ import annotations

DONE = b"[DONE]"


class EventReader:
    """Gives the data of each event once it is complete, however the bytes are cut. Made to be cheap: a load generator
    reads thousands of them a second. Comments and other fields than `data` are passed over."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that `piece` has completed."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        events: list[bytes] = []
        for line in lines:
            text = line[:-1] if line.endswith(b"\r") else line
            if text.startswith(b"data:"):
                self._data.append(text[6:] if text[5:6] == b" " else text[5:])
            elif not text and self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data.clear()
        return events
