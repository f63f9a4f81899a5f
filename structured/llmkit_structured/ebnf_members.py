"""The members of a JSON object in EBNF: in order, optional ones left out or not, further ones behind, counted."""

from __future__ import annotations

from collections.abc import Callable

from llmkit_structured.schema_refusal import refuse

MAX_RULES = 50_000


class Members:
    """The members of an object in their order. States: the next property, and how many members there are so far,
    counted as far as that matters."""

    def __init__(
        self,
        rule: Callable[[str], str],
        comma: str,
        members: list[tuple[str, bool]],
        other: str | None,
        low: int,
        high: int | None,
    ) -> None:
        """rule: makes a rule of an expression, and returns its name. members: expression of each, and whether it is
        required. other: of a member that is not listed; None: there are none. low, high: number of members."""
        self._rule = rule
        self._comma = comma
        self._members = [(rule(text), needed) for text, needed in members]
        self._other = None if other is None else rule(other)
        least = sum(needed for _, needed in members)
        self._low = low if low > least else 0  # else there are enough anyway
        self._high = None if high is None or (other is None and high >= len(members)) else high
        self._counted = max(1, self._low, 0 if self._high is None else self._high + 1)
        if len(members) * self._counted > MAX_RULES:
            refuse("#", "minProperties or maxProperties beside so many properties is not supported")

    def first(self) -> tuple[bool, str] | None:
        """(whether there may be no member at all, the expression of at least one member, "" if there can be none);
        None if there is no way to have as many as are needed."""
        comma = self._comma
        after: list[str | None] = [self._tail(count) for count in range(self._counted + 1)]
        head: str | None = self._others_first()
        for member, needed in reversed(self._members):
            options = [] if after[1] is None else [f"{member} {after[1]}".rstrip()]
            if not needed and head is not None:
                options.append(head)
            following: list[str | None] = list(after)
            for count in range(1, self._counted + 1):
                later = after[min(count + 1, self._counted)]
                taken = [] if later is None else [f"{comma} {member} {later}".rstrip()]
                if not needed and (skipped := after[count]) is not None:
                    taken.append(skipped or '""')
                following[count] = self._named(taken)
            after, head = following, self._named(options)
        empty = self._low == 0 and not any(needed for _, needed in self._members)
        if head is None and not empty:
            return None
        return empty, head or ""

    def _named(self, options: list[str]) -> str | None:
        if not options:
            return None
        return options[0] if len(options) == 1 and " " not in options[0] else self._rule(" | ".join(options))

    def _allowed(self, count: int) -> tuple[int, int | None] | None:
        """How many further members may follow `count`; None if none of that is enough."""
        if self._high is not None and count > self._high:
            return None
        missing = max(0, self._low - count)
        if missing > 1 or (missing and self._other is None):
            return None  # two names that are not listed may be the same
        return missing, None if self._high is None else self._high - count

    def _tail(self, count: int) -> str | None:
        """What follows the last property after `count` members, at least one: "" for nothing."""
        allowed = self._allowed(count)
        if count == 0 or allowed is None:
            return None
        least, most = allowed
        if self._other is None or most == 0:
            return ""
        return self._rule(repeated(f"{self._comma} {self._other}", least, most))

    def _others_first(self) -> str | None:
        """Members that are not listed, at least one, and no others."""
        if self._other is None or self._high == 0 or self._low > 1:
            return None
        most = None if self._high is None else self._high - 1
        following = repeated(f"{self._comma} {self._other}", 0, most)
        return self._rule(f"{self._other} {following}".rstrip())


def repeated(part: str, low: int, high: int | None) -> str:
    """`part` from `low` to `high` times."""
    if high == 0:
        return ""
    counts = {(0, 1): "?", (0, None): "*", (1, None): "+", (1, 1): ""}
    return f"({part})" + counts.get((low, high), f"{{{low},{'' if high is None else high}}}")
