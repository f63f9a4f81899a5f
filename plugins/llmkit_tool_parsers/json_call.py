"""A call written as a JSON object: `{"name": …, "arguments": {…}}`, in any order, with further members."""

from __future__ import annotations

from collections.abc import Sequence

from llmkit.answers.arriving_text import BLANKS, ArrivingText, Waiting
from llmkit_tool_parsers.answer_parts import AnswerParts
from llmkit_tool_parsers.json_values import copy_container, copy_decoded, read_name, skip_value

ARGUMENTS = ("arguments", "parameters")


class JsonCall:
    """One call while it is read. It begins, and is told, when its name and the first character of its arguments are
    there; until then the text is recorded and can be given back.

    known: names that are tools; None where the format's marks leave no doubt that a call is meant.
    """

    def __init__(self, text: ArrivingText, parts: AnswerParts, known: frozenset[str] | None) -> None:
        self.begun = False
        self._text = text
        self._parts = parts
        self._known = known
        self._name: str | None = None
        self._held: list[str] = []
        self._has_arguments = False
        self._any = False

    def read(self, stops: Sequence[str] = (), *, opened: bool = False) -> Waiting[bool]:
        """Read the object that is next; whether it was a call up to its closing brace. If not, but `begun`, it is one
        that broke off there. stops: marks at which an object that is not closed ends. opened: its brace has been
        read."""
        text = self._text
        if not opened and not (yield from text.take("{")):
            return False
        while True:
            yield from text.take_all(BLANKS)
            if (yield from text.take("}")):
                return self._closed()
            if (yield from text.peek()) != '"' or not (yield from self._member(stops)):
                return False
            yield from text.take_all(BLANKS)
            if not (yield from text.take(",")) and (yield from text.peek()) != "}":
                return False

    def _member(self, stops: Sequence[str]) -> Waiting[bool]:
        text = self._text
        key = yield from read_name(text)
        yield from text.take_all(BLANKS)
        if key is None or not (yield from text.take(":")):
            return False
        yield from text.take_all(BLANKS)
        character = yield from text.peek()
        if key == "name":
            name = (yield from read_name(text)) if character == '"' else None
            return name is not None and self._named(name)
        if key not in ARGUMENTS or self._has_arguments:
            return (yield from skip_value(text, stops))
        self._has_arguments = True
        if character == "{":
            return (yield from copy_container(text, self._arguments, stops))
        if character == '"':
            return (yield from copy_decoded(text, self._arguments))
        return (yield from text.take("null"))

    def _named(self, name: str) -> bool:
        if not name or (self._known is not None and name not in self._known):
            return False
        if self._name is None:
            self._name = name
            if self._held:
                self._arguments("")
        return True

    def _arguments(self, piece: str) -> None:
        self._held.append(piece)
        if self._name is not None:
            self._begin()
            for one in self._held:
                self._any = self._any or bool(one)
                self._parts.arguments(one)
            self._held.clear()

    def _begin(self) -> None:
        if not self.begun:
            assert self._name is not None
            self.begun = True
            self._text.recorded()
            self._parts.begin(self._name)

    def _closed(self) -> bool:
        """No arguments at all are none."""
        if self._name is None:
            return False
        self._begin()
        if not self._any:
            self._parts.arguments("{}")
        return True
