r"""Reads regular expressions: the subset that means the same to ECMA-262 (which JSON schema refers to) and to Python.

Literals, `.`, classes, `\d \w \s` and their opposites (ASCII digits and word characters, Unicode blanks, as in
ECMA-262), `\t \n \r \f \v \0 \xHH \uHHHH \u{…} \cX \p{…}`, groups of any kind (they capture nothing), alternatives,
repetitions (lazy ones are the same language), `^` and `$` at the ends. `.` is any character but a line end. What
cannot be a set of whole texts, or is read differently by different engines, is refused by name: look-around,
back-references, `\b`, flags, anchors in the middle, possessive repetitions, `[]` and `[^]`, `[[:alpha:]]`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmkit_structured.regex_tree import ANY, Chars, Tree, chars, choice, complement, repeat, sequence, single, text
from llmkit_structured.unicode_categories import unicode_class

MAX_DEPTH = 100
MAX_REPEAT = 1_000_000

DIGIT = chars([(0x30, 0x39)])
WORD = chars([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
_BLANKS = "\t\n\v\f\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"
SPACE = chars([(0x2000, 0x200A), *((ord(blank), ord(blank)) for blank in _BLANKS)])
DOT = complement(chars([(10, 10), (13, 13), (0x2028, 0x2029)]))
_CLASSES = {"d": DIGIT, "w": WORD, "s": SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_COUNTS = re.compile(r"\{(\d+)(,(\d*))?\}")
_NAMED_GROUP = re.compile(r"\(\?P?<([A-Za-z_]\w*)>", re.ASCII)
_LOOKS = {"(?=": "look-ahead", "(?!": "look-ahead", "(?<=": "look-behind", "(?<!": "look-behind"}


class UnsupportedRegex(ValueError):
    """What of the expression cannot be expressed, or that it is malformed; a phrase, with the position."""


class MalformedRegex(UnsupportedRegex):
    """What makes it no regular expression, in whatever dialect."""


@dataclass(frozen=True)
class Anchored:
    """A parsed expression: `tree` and whether each end was anchored in the source."""

    tree: Tree
    start: bool
    end: bool


def whole(source: str) -> Tree:
    """The texts that `source` matches from beginning to end. Raises UnsupportedRegex."""
    return choice(option.tree for option in _Parser(source).parse())


def found_in(source: str) -> Tree:
    """The texts in which `source` matches somewhere, as JSON schema's `pattern`. Raises UnsupportedRegex."""
    anything = repeat(ANY, 0, None)
    return choice(
        sequence([*([] if o.start else [anything]), o.tree, *([] if o.end else [anything])])
        for o in _Parser(source).parse()
    )


class _Parser:
    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self._depth = 0

    def parse(self) -> list[Anchored]:
        """The alternatives of the whole expression."""
        options = self._alternatives()
        if self._at < len(self._source):
            raise self._malformed("a closing parenthesis without an opening one")
        return options

    def _error(self, what: str) -> UnsupportedRegex:
        return UnsupportedRegex(f"{what} at character {self._at}")

    def _malformed(self, what: str) -> MalformedRegex:
        return MalformedRegex(f"{what} at character {self._at}")

    def _peek(self, length: int = 1) -> str:
        return self._source[self._at : self._at + length]

    def _alternatives(self) -> list[Anchored]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"more than {MAX_DEPTH} groups in one another")
        options = self._sequence()
        while self._peek() == "|":
            self._at += 1
            options.extend(self._sequence())
        self._depth -= 1
        return options

    def _sequence(self) -> list[Anchored]:
        """One alternative; several, where a group at one of its ends has differently anchored alternatives."""
        parts: list[list[Anchored]] = []
        while (character := self._peek()) and character not in "|)":
            if character in "^$":
                self._at += 1
                parts.append([Anchored(sequence([]), character == "^", character == "$")])
            else:
                parts.append(self._repeated())
        return self._joined(parts)

    def _joined(self, parts: list[list[Anchored]]) -> list[Anchored]:
        total = [Anchored(sequence([]), False, False)]
        for options in _without_runs(parts):
            if len(total) * len(options) > 64:
                raise self._error("too many anchored alternatives")
            total = [self._pair(one, other) for one in total for other in options]
        return total

    def _pair(self, one: Anchored, other: Anchored) -> Anchored:
        nothing = sequence([])
        if (one.end and other.tree != nothing) or (other.start and one.tree != nothing):
            raise self._error("an anchor in the middle")
        return Anchored(sequence([one.tree, other.tree]), one.start or other.start, one.end or other.end)

    def _repeated(self) -> list[Anchored]:
        before = self._at
        options = self._atom()
        counts = self._counts()
        if counts is None:
            return options
        if any(option.start or option.end for option in options):
            raise self._error("a repeated anchor")
        if self._peek() == "?":
            self._at += 1  # lazy: another order of trying, the same texts
        elif self._peek() == "+":
            raise self._error("a possessive repetition")
        if self._counts() is not None:
            raise self._error("a repetition of a repetition")
        low, high = counts
        if max(low, high or 0) > MAX_REPEAT:
            self._at = before
            raise self._error(f"a repetition of more than {MAX_REPEAT} times")
        if high is not None and high < low:
            raise self._malformed("a repetition whose maximum is below its minimum")
        return [Anchored(repeat(choice(option.tree for option in options), low, high), False, False)]

    def _counts(self) -> tuple[int, int | None] | None:
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if (character := self._peek()) in simple:
            self._at += 1
            return simple[character]
        match = _COUNTS.match(self._source, self._at)
        if match is None:
            return None
        if max(len(match[1]), len(match[3] or "")) > 9:
            raise self._error(f"a repetition of more than {MAX_REPEAT} times")
        self._at = match.end()
        low = int(match[1])
        return (low, low) if match[2] is None else (low, int(match[3]) if match[3] else None)

    def _atom(self) -> list[Anchored]:
        character = self._peek()
        if character == "(":
            return self._group()
        if character in "*+?":
            raise self._malformed("a repetition of nothing")
        self._at += 1
        if character == "[":
            tree: Tree = self._class()
        elif character == "\\":
            tree = self._escape(in_class=False)
        elif character == ".":
            tree = DOT
        elif character == "{" and self._peek() == ",":
            raise self._error("'{,', which is read as a repetition by some and as text by others,")
        else:
            tree = text(character)
            if tree == choice([]):
                raise self._error("half of a surrogate pair")
        return [Anchored(tree, False, False)]

    def _group(self) -> list[Anchored]:
        for start, name in _LOOKS.items():
            if self._source.startswith(start, self._at):
                raise self._error(name)
        if self._peek(3) == "(?:":
            self._at += 3
        elif (named := _NAMED_GROUP.match(self._source, self._at)) is not None:
            self._at = named.end()
        elif self._peek(2) == "(?":
            raise self._error(f"the group {self._peek(3)!r} (flags, conditions and comments are not supported)")
        else:
            self._at += 1
        options = self._alternatives()
        if self._peek() != ")":
            raise self._malformed("an opening parenthesis without a closing one")
        self._at += 1
        if not any(option.start or option.end for option in options):
            return [Anchored(choice(option.tree for option in options), False, False)]
        return options

    def _escape(self, *, in_class: bool) -> Chars:
        character = self._peek()
        self._at += 1
        if character.lower() in _CLASSES:
            found = _CLASSES[character.lower()]
            return complement(found) if character.isupper() else found
        if character in "pP" and character:
            return self._property(negated=character == "P")
        if character in _CONTROLS:
            return single(_CONTROLS[character])
        if character == "0" and not self._peek().isdigit():
            return single(0)
        if character == "c" and re.fullmatch("[A-Za-z]", self._peek()):
            self._at += 1
            return single(ord(self._source[self._at - 1]) % 32)
        if character in ("x", "u", "U"):
            return self._code(character)
        if in_class and character == "b":
            return single(8)
        self._at -= 1
        if not character:
            raise self._malformed("a backslash at the end")
        if character.isdigit() or character == "k":
            raise self._error("a back-reference")
        if character in "bB":
            raise self._error(f"the word boundary \\{character}")
        if character.isalnum() or character == "_" or ord(character) > 126 or ord(character) < 32:
            raise self._error(f"the escape \\{character}")
        self._at += 1
        return single(ord(character))

    def _code(self, kind: str) -> Chars:
        forms = {"x": r"([0-9A-Fa-f]{2})", "u": r"([0-9A-Fa-f]{4})|\{([0-9A-Fa-f]{1,6})\}", "U": r"([0-9A-Fa-f]{8})"}
        match = re.compile(forms[kind]).match(self._source, self._at)
        if match is None:
            raise self._error(f"the escape \\{kind} without its hexadecimal digits")
        code = int(next(group for group in match.groups() if group), 16)
        self._at = match.end()
        if 0xD800 <= code < 0xDC00:
            low = re.compile(r"\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})").match(self._source, self._at)
            if low is not None:
                self._at = low.end()
                code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise self._error("a code that is no character")
        return single(code)

    def _property(self, *, negated: bool) -> Chars:
        match = re.compile(r"\{([A-Za-z_=]+)\}").match(self._source, self._at)
        found = None if match is None else unicode_class(match[1])
        if match is None or found is None:
            raise self._error("a Unicode property other than a general category")
        self._at = match.end()
        return complement(found) if negated else found

    def _class(self) -> Chars:
        negated = self._peek() == "^"
        self._at += negated
        if self._peek() == "]":
            raise self._error("a class without characters")
        ranges: set[tuple[int, int]] = set()  # of which expressions can name many twice
        while self._peek() != "]":
            low = self._class_item()
            if self._peek() == "-" and self._peek(2) not in ("-]", "-"):
                self._at += 1
                high = self._class_item()
                if len(low.ranges) != 1 or len(high.ranges) != 1 or _width(low) != 1 or _width(high) != 1:
                    raise self._error("a range between classes")
                if high.ranges[0][0] < low.ranges[0][0]:
                    raise self._malformed("a range that is out of order")
                ranges.add((low.ranges[0][0], high.ranges[0][0]))
            else:
                ranges.update(low.ranges)
        self._at += 1
        found = chars(ranges)
        return complement(found) if negated else found

    def _class_item(self) -> Chars:
        character = self._peek()
        if not character:
            raise self._malformed("a class without its closing bracket")
        if self._peek(2) in ("[:", "[.", "[=", "&&", "--", "~~", "||"):
            raise self._error(f"{self._peek(2)!r} in a class")
        self._at += 1
        if character == "\\":
            return self._escape(in_class=True)
        if 0xD800 <= ord(character) < 0xE000:
            raise self._error("half of a surrogate pair")
        return single(ord(character))


def _width(part: Chars) -> int:
    return part.ranges[0][1] - part.ranges[0][0] + 1


def _without_runs(parts: list[list[Anchored]]) -> list[list[Anchored]]:
    """`parts`, with those in a row that leave no choice as one: each for itself would copy all that is before it."""
    result: list[list[Anchored]] = []
    run: list[Tree] = []
    for options in [*parts, []]:
        if len(options) == 1 and not options[0].start and not options[0].end:
            run.append(options[0].tree)
            continue
        if run:
            result.append([Anchored(sequence(run), False, False)])
            run = []
        if options:
            result.append(options)
    return result
