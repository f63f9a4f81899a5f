"""Trees of regular languages as expressions of EBNF, in the notation of llama.cpp's GBNF, which xgrammar reads."""

from __future__ import annotations

from collections.abc import Iterator

from llmkit.grammars.effort import spend
from llmkit_structured.regex_tree import Chars, Choice, Sequence, Tree

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _,:;<>=!@%~/+*.'(){}|?&#$")


def literal(text: str) -> str:
    """Exactly `text`."""
    return '"' + "".join(map(_character, text)) + '"'


def expression(tree: Tree) -> str:
    """The texts of `tree`, as one expression that can stand beside others. Raises ValueError if there is none."""
    spend()
    if isinstance(tree, Chars):
        return _set(tree)
    if isinstance(tree, Sequence):
        return " ".join(_parts(tree)) if tree.parts else '""'
    if isinstance(tree, Choice):
        if not tree.options:
            raise ValueError("a language without any text")
        return "(" + " | ".join(map(expression, tree.options)) + ")"
    inner = f"({expression(tree.part)})"
    counts = {(0, 1): "?", (0, None): "*", (1, None): "+"}
    if (tree.low, tree.high) in counts:
        return inner + counts[tree.low, tree.high]
    return f"{inner}{{{tree.low},{'' if tree.high is None else tree.high}}}"


def _parts(tree: Sequence) -> Iterator[str]:
    """Single characters in a row become one literal."""
    run = ""
    for part in tree.parts:
        if isinstance(part, Chars) and len(part.ranges) == 1 and part.ranges[0][0] == part.ranges[0][1]:
            run += chr(part.ranges[0][0])
            continue
        if run:
            yield literal(run)
            run = ""
        yield expression(part)
    if run:
        yield literal(run)


def _set(tree: Chars) -> str:
    if not tree.ranges:
        raise ValueError("a set without any character")
    if len(tree.ranges) == 1 and tree.ranges[0][0] == tree.ranges[0][1]:
        return literal(chr(tree.ranges[0][0]))
    inside = "".join(_code(low) if low == high else f"{_code(low)}-{_code(high)}" for low, high in tree.ranges)
    return f"[{inside}]"


def _character(character: str) -> str:
    return character if character in _PLAIN else _code(ord(character))


def _code(code: int) -> str:
    """A character in a set, where more of them mean something."""
    character = chr(code)
    if character.isascii() and character.isalnum():
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
