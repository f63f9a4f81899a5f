"""JSON values in arriving text, copied as they are written or decoded. Forgiving: the model's mistakes inside a value
are the client's to see, as long as it can be told where the value ends."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from llmkit.answers.arriving_text import ArrivingText, Waiting, Write

MAX_NAME_CHARS = 1024

_PLAIN = re.compile(r'[^"{}\[\]<]+')
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')
_UNESCAPED = re.compile(r'[^"\\]+')
_SCALAR = re.compile(r"[\w.+-]+")
_PAIRS = {"}": "{", "]": "["}

_ESCAPE = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u[0-9a-fA-F]{4}|\\.", re.DOTALL)
_CUT_ESCAPE = re.compile(
    r"\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?)?)?"
)


def copy_container(text: ArrivingText, write: Write, stops: Sequence[str] = ()) -> Waiting[bool]:
    """Copy an object or array as it is written, up to the bracket that closes the one it begins with. Control
    characters within strings, which JSON forbids, are escaped.

    False if it is not closed: the text ends, or one of `stops` stands outside a string; that is not read.
    """
    opened: list[str] = []
    while True:
        yield from text.take_all(_PLAIN, write)
        character = yield from text.peek()
        if not character:
            return False
        if character == '"':
            if not (yield from _copy_string(text, write)):
                return False
            continue
        for stop in stops:
            if character == stop[0] and (yield from text.is_next(stop)):
                return False
        write(text.advance(1))
        if character in "{[":
            opened.append(character)
        elif opened and _PAIRS.get(character) == opened[-1]:
            opened.pop()
            if not opened:
                return True


def _copy_string(text: ArrivingText, write: Write) -> Waiting[bool]:
    write(text.advance(1))
    while True:
        yield from text.take_all(_IN_STRING, write)
        character = yield from text.peek()
        if not character:
            return False
        text.advance(1)
        if character == "\\":
            escaped = yield from text.peek()
            if not escaped:
                return False
            write(character + text.advance(1))
            continue
        write(json.dumps(character)[1:-1] if character < " " else character)
        if character == '"':
            return True


def copy_decoded(text: ArrivingText, write: Write) -> Waiting[bool]:
    """Write the content of a JSON string with its escapes decoded; half a surrogate pair becomes U+FFFD. False if it is
    not closed; an escape that is cut off is left out."""
    text.advance(1)
    while True:
        yield from text.take_all(_UNESCAPED, write)
        character = yield from text.peek()
        if not character:
            return False
        if character == '"':
            text.advance(1)
            return True
        window = yield from text.ahead(12)
        if len(window) < 12 and _CUT_ESCAPE.fullmatch(window):
            text.advance(len(window))
            return False
        match = _ESCAPE.match(window)
        assert match is not None, "a backslash with another character after it"
        write(_decoded(text.advance(len(match[0]))))


def _decoded(escape: str) -> str:
    try:
        character: str = json.loads(f'"{escape}"', strict=False)
    except ValueError:
        return escape
    return character.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def read_name(text: ArrivingText) -> Waiting[str | None]:
    """The value of the JSON string that is next; None if it is not closed, longer than a name can be or no string."""
    pieces: list[str] = []
    text.advance(1)
    while True:
        yield from text.take_all(_IN_STRING, pieces.append, MAX_NAME_CHARS)
        character = yield from text.peek()
        if character == "\\":
            pieces.append((yield from text.ahead(2)))
            text.advance(len(pieces[-1]))
        if character != "\\" or sum(map(len, pieces)) > MAX_NAME_CHARS:
            break
    if character != '"':
        return None
    text.advance(1)
    try:
        name: str = json.loads(f'"{"".join(pieces)}"')
        name.encode()
    except ValueError:
        return None
    return name


def skip_value(text: ArrivingText, stops: Sequence[str] = ()) -> Waiting[bool]:
    """Read any value; False if there is none or it is not closed."""
    character = yield from text.peek()
    if character == '"':
        return (yield from copy_decoded(text, _nowhere))
    if character and character in "{[":
        return (yield from copy_container(text, _nowhere, stops))
    return bool((yield from text.take_all(_SCALAR)))


def _nowhere(_: str) -> None:
    return


def members(source: str) -> list[tuple[str, str]]:
    """The members of an object, each a name and the JSON text of its value as it is written. Raises ValueError."""
    decoder, blank = json.JSONDecoder(), re.compile(r"\s*")

    def after_blanks(place: int) -> int:
        return blank.match(source, place).end()  # type: ignore[union-attr]

    def expect(literals: str, place: int) -> int:
        if source[place : place + 1] not in literals or place >= len(source):
            raise ValueError(f"one of {literals} is missing at {place}")
        return after_blanks(place + 1)

    found: list[tuple[str, str]] = []
    place = expect("{", after_blanks(0))
    while not source.startswith("}", place):
        name, end = decoder.raw_decode(source, place)
        start = expect(":", after_blanks(end))
        _, end = decoder.raw_decode(source, start)
        found.append((name, source[start:end]))
        place = after_blanks(end)
        if not source.startswith("}", place):
            place = expect(",", place)
    return found
