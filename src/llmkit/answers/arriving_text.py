"""Text that arrives in pieces, read as if it were there as a whole.

A reader is a generator that yields wherever it needs more text, so that it can be written straight down:

    def read(text):
        marker = yield from text.until(Markers("<a>"), write)
        if (yield from text.peek()) == "{":
            …

`run` drives it: `feed` a piece and it goes on until nothing more can be told, `finish` and it goes on to its end. Every
decision depends on the text alone, never on where it was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Waiting = Generator[None, None, T]
"""What a reader's methods return: `yield from` it."""

Write = Callable[[str], None]

BLANKS = re.compile(r"[ \t\r\n]+")


class Markers:
    """Literal texts to look for, none of which is a beginning of another one."""

    def __init__(self, *texts: str) -> None:
        self.pattern = re.compile("|".join(map(re.escape, texts)))
        self._beginnings = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        self._longest = max(map(len, texts)) - 1

    def begun(self, text: str, start: int) -> int:
        """How many characters at the end of text[start:] may be the beginning of a marker; the most that may."""
        for length in range(min(self._longest, len(text) - start), 0, -1):
            if text[len(text) - length :] in self._beginnings:
                return length
        return 0


class ArrivingText:
    """The text so far, from the place up to which it has been read. Only what cannot be judged yet is kept."""

    def __init__(self) -> None:
        self._text = ""
        self._place = 0
        self._ended = False
        self._record: list[str] | None = None

    # ---- the side of the one who has the text

    def run(self, reader: Waiting[None], text: str | None) -> None:
        """Let `reader` go on with the next piece, or with None to its end."""
        if text is None:
            self._ended = True
        else:
            self._text = self._text[self._place :] + text
            self._place = 0
        for _ in reader:
            if not self._ended:
                break

    # ---- the reader's side

    def record(self, before: str = "") -> None:
        """Keep what is read from now on, after `before`, to be able to give it back."""
        self._record = [before]

    def recorded(self) -> str:
        """What was read since `record`, which ends with this."""
        found, self._record = "".join(self._record or ()), None
        return found

    def advance(self, count: int) -> str:
        """Read `count` characters, which must be there."""
        read = self._text[self._place : self._place + count]
        self._place += count
        if self._record is not None:
            self._record.append(read)
        return read

    def ahead(self, count: int) -> Waiting[str]:
        """The next `count` characters, not read; fewer only at the end. `count` should be small: they are kept."""
        while len(self._text) - self._place < count and not self._ended:
            yield
        return self._text[self._place : self._place + count]

    def peek(self) -> Waiting[str]:
        """The next character, not read; "" at the end."""
        while len(self._text) == self._place and not self._ended:
            yield
        return self._text[self._place : self._place + 1]

    def is_next(self, literal: str) -> Waiting[bool]:
        """Whether the text goes on with `literal`, which is not read. Waits only as long as it may."""
        while True:
            here = self._text[self._place : self._place + len(literal)]
            if len(here) == len(literal) or self._ended or not literal.startswith(here):
                return here == literal
            yield

    def take(self, literal: str) -> Waiting[bool]:
        """Read `literal` if the text goes on with it."""
        found = yield from self.is_next(literal)
        if found:
            self.advance(len(literal))
        return found

    def take_all(self, characters: re.Pattern[str], write: Write | None = None, most: int = 1 << 62) -> Waiting[int]:
        """Read on while the text consists of `characters` (an expression of one or more of a class), at most `most` of
        them; how many there were."""
        count = 0
        while count < most and (yield from self.peek()):
            match = characters.match(self._text, self._place)
            if match is None:
                break
            read = self.advance(min(len(match[0]), most - count))
            count += len(read)
            if write is not None:
                write(read)
        return count

    def until(self, markers: Markers, write: Write, *, drop_cut: bool = False) -> Waiting[str | None]:
        """Write the text before the next of `markers` and read the marker; None at the end. drop_cut: what may be the
        beginning of a marker at the end of the text is not written."""
        while True:
            match = markers.pattern.search(self._text, self._place)
            if match is not None:
                self._write(match.start() - self._place, write)
                return self.advance(len(match[0]))
            rest = len(self._text) - self._place
            begun = markers.begun(self._text, self._place)
            if self._ended:
                self._write(rest - begun if drop_cut else rest, write)
                self.advance(len(self._text) - self._place)
                return None
            self._write(rest - begun, write)
            yield

    def _write(self, count: int, write: Write) -> None:
        if count:
            write(self.advance(count))
