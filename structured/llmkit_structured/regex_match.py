"""Whether a text is of a regular language, in time that does not explode: no way through the tree is tried twice."""

from __future__ import annotations

from llmkit.grammars.effort import spend
from llmkit_structured.regex_tree import Chars, Choice, Repeat, Sequence, Tree


def matches(tree: Tree, text: str) -> bool:
    """Whether `tree` holds the whole of `text`. Python's `re` finds that out by backtracking, which takes years for
    expressions such as (a|aa)+."""
    return bool(_Match(text).ends(tree, 1) >> len(text) & 1)


class _Match:
    """Follows all ways at once. A set of places in `text`, 0 to its length, is a number with these bits (the method:
    K. Thompson, Regular Expression Search Algorithm, 1968)."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._chars: dict[Chars, int] = {}
        self._known: dict[tuple[int, int], int] = {}  # by identity of the node, which the tree keeps alive

    def ends(self, tree: Tree, starts: int) -> int:
        """Where a text of `tree` may end that begins at one of `starts`."""
        if not starts:
            return 0
        if isinstance(tree, Chars):
            return (starts & self._places(tree)) << 1
        key = (id(tree), starts)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._new_ends(tree, starts)
        return known

    def _places(self, part: Chars) -> int:
        """Where a character of `part` stands."""
        places = self._chars.get(part)
        if places is None:
            bits = "".join("1" if character in part else "0" for character in reversed(self._text))
            places = self._chars[part] = int(bits or "0", 2)
        return places

    def _new_ends(self, tree: Sequence | Choice | Repeat, starts: int) -> int:
        spend()
        if isinstance(tree, Sequence):
            for part in tree.parts:
                starts = self.ends(part, starts)
            return starts
        if isinstance(tree, Choice):
            found = 0
            for option in tree.options:
                found |= self.ends(option, starts)
            return found
        return self._repeated(tree, starts)

    def _repeated(self, tree: Repeat, starts: int) -> int:
        for _ in range(tree.low):
            after = self.ends(tree.part, starts)
            if after == starts:  # further times change nothing
                break
            starts = after
        found, count = starts, tree.low
        while starts and (tree.high is None or count < tree.high):
            starts = self.ends(tree.part, starts) & ~found  # ways from places reached before are known
            found |= starts
            count += 1
        return found
