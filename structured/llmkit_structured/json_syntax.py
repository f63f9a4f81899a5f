"""The syntax of JSON, character by character, stricter than libraries that only look for the values of a schema.

States are immutable. Blanks may stand between tokens only, as many in a row as the layout says, none before the value
and none after it. Strings hold no raw control characters; of the escapes, `\\u` is taken for control characters only,
so that every text has one spelling but for blanks and numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

BLANKS = " \t\n\r"
_ESCAPES = '"\\bfnrt'
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_COMPLETE_NUMBER = ("zero", "digits", "places", "exponent digits")


@dataclass(frozen=True)
class SyntaxRules:
    """max_blanks: most blanks in a row. fixed: only one space, after a colon or comma. integers: whether all numbers
    are written as integers have to be, without an exponent and without "-0". blank_first: whether a string may begin
    with a blank."""

    max_blanks: int = 32
    fixed: bool = False
    integers: bool = False
    blank_first: bool = True


@dataclass(frozen=True)
class JsonSyntax:
    """Where in a JSON text one is.

    mode: what may follow. open: the brackets and braces that are open. rest: of a literal, an escape. blanks: how many
    have just been. is_key: whether the string being written is a property's name.
    """

    rules: SyntaxRules
    mode: str = "value"
    open: str = ""
    rest: str = ""
    blanks: int = 0
    is_key: bool = False
    may_blank: bool = False

    def step(self, character: str) -> JsonSyntax | None:
        """The state after one more character; None if it may not follow."""
        if self.mode in ("string", "string start", "escape", "hex"):
            return self._in_string(character)
        if self.mode == "literal":
            if character != self.rest[0]:
                return None
            return replace(self, rest=self.rest[1:]) if len(self.rest) > 1 else self._after_value()
        if self.mode in _NUMBER_STEPS:
            inside = self._in_number(character)
            if inside is not None or self.mode not in _COMPLETE_NUMBER:
                return inside
            ended = self._after_value()
            return ended.step(character)
        if character in BLANKS:
            return self._blank(character)
        return self._token(character)

    @property
    def in_free_string(self) -> bool:
        """Whether any plain character may follow in a string."""
        return self.mode in ("string", "string start")

    @property
    def is_complete(self) -> bool:
        """Whether the text is a whole JSON text."""
        return self.mode == "end" or (self.mode in _COMPLETE_NUMBER and not self.open)

    def _blank(self, character: str) -> JsonSyntax | None:
        if self.mode == "end" or (self.mode == "value" and not self.open):
            return None
        if self.rules.fixed:
            allowed = self.may_blank and character == " " and self.blanks == 0
        else:
            allowed = self.blanks < self.rules.max_blanks
        return replace(self, blanks=self.blanks + 1) if allowed else None

    def _token(self, character: str) -> JsonSyntax | None:
        if self.mode in ("value", "first item"):
            if character == "]" and self.mode == "first item":
                return self._close("[")
            return self._begin_value(character)
        if self.mode in ("key", "first key"):
            if character == '"':
                return self._at("string", is_key=True)
            return self._close("{") if character == "}" and self.mode == "first key" else None
        if self.mode == "colon":
            return self._at("value", may_blank=True) if character == ":" else None
        if self.mode == "after":
            if character == ",":
                return self._at("key" if self.open[-1] == "{" else "value", may_blank=True)
            if character in "]}":
                return self._close("[" if character == "]" else "{")
        return None

    def _begin_value(self, character: str) -> JsonSyntax | None:
        if character == '"':
            return self._at("string start")
        if character in "{[":
            opened = replace(self, open=self.open + character)
            return opened._at("first key" if character == "{" else "first item")
        if character in _LITERALS:
            return self._at("literal", rest=_LITERALS[character])
        if character == "-":
            return self._at("minus")
        if "0" <= character <= "9":
            return self._at("zero" if character == "0" else "digits")
        return None

    def _at(self, mode: str, *, rest: str = "", is_key: bool = False, may_blank: bool = False) -> JsonSyntax:
        return JsonSyntax(self.rules, mode, self.open, rest, 0, is_key, may_blank)

    def _after_value(self) -> JsonSyntax:
        return self._at("after" if self.open else "end")

    def _close(self, bracket: str) -> JsonSyntax | None:
        if not self.open.endswith(bracket):
            return None
        return replace(self, open=self.open[:-1])._after_value()

    def _in_string(self, character: str) -> JsonSyntax | None:
        if self.mode == "escape":
            if character == "u":
                return replace(self, mode="hex", rest="")
            return replace(self, mode="string") if character in _ESCAPES else None
        if self.mode == "hex":
            digits = self.rest + character
            allowed = len(digits) <= 2 and digits in ("0", "00")
            allowed = allowed or (len(digits) == 3 and character in "01")
            allowed = allowed or (len(digits) == 4 and _is_long_escape(digits))
            if not allowed:
                return None
            return replace(self, mode="string", rest="") if len(digits) == 4 else replace(self, rest=digits)
        if character == '"':
            return self._at("colon") if self.is_key else self._after_value()
        if character == "\\":
            return replace(self, mode="escape")
        if character < " " or (self.mode == "string start" and character in BLANKS and not self.rules.blank_first):
            return None
        return self if self.mode == "string" else replace(self, mode="string")

    def _in_number(self, character: str) -> JsonSyntax | None:
        kind = "digit" if "0" <= character <= "9" else character
        following = _NUMBER_STEPS[self.mode].get(kind)
        if self.mode == "minus" and character == "0":
            following = None if self.rules.integers else "zero"
        if following is None or (following == "exponent" and self.rules.integers):
            return None
        return replace(self, mode=following)


_NUMBER_STEPS: dict[str, dict[str, str]] = {
    "minus": {"digit": "digits"},
    "zero": {".": "point", "e": "exponent", "E": "exponent"},
    "digits": {"digit": "digits", ".": "point", "e": "exponent", "E": "exponent"},
    "point": {"digit": "places"},
    "places": {"digit": "places", "e": "exponent", "E": "exponent"},
    "exponent": {"digit": "exponent digits", "+": "exponent sign", "-": "exponent sign"},
    "exponent sign": {"digit": "exponent digits"},
    "exponent digits": {"digit": "exponent digits"},
}


def _is_long_escape(digits: str) -> bool:
    """Whether `\\u` and these digits are a control character that has no short escape."""
    return digits[3] in "0123456789abcdef" and int(digits, 16) < 32 and int(digits, 16) not in (8, 9, 10, 12, 13)
