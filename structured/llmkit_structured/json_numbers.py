"""Languages of JSON numbers between bounds, as trees over decimal digits, without exponents.

Bounds are compared digit by digit: the digits of a number lie between those of two others of the same length if, at the
first place where they leave a bound, they leave it to the inner side.
"""

from __future__ import annotations

from decimal import Decimal

from llmkit_structured.regex_tree import (
    EMPTY,
    NOTHING,
    Choice,
    Repeat,
    Sequence,
    Tree,
    chars,
    choice,
    length_bounds,
    optional,
    repeat,
    sequence,
    text,
)
from llmkit_structured.schema_form import Number
from llmkit_structured.schema_refusal import refuse
from llmkit_structured.schema_solve import whole_bounds

MAX_PLACES = 100

DIGIT = chars([(0x30, 0x39)])
_POSITIVE = chars([(0x31, 0x39)])
_NATURAL = choice([text("0"), sequence([_POSITIVE, repeat(DIGIT, 0, None)])])
_EXPONENT = sequence([chars([(0x45, 0x45), (0x65, 0x65)]), optional(chars([(0x2B, 0x2B), (0x2D, 0x2D)]))])
ANY_NUMBER = sequence(
    [
        optional(text("-")),
        _NATURAL,
        optional(sequence([text("."), repeat(DIGIT, 1, None)])),
        optional(sequence([_EXPONENT, repeat(DIGIT, 1, 3)])),
    ]
)
ANY_INTEGER = sequence([optional(text("-")), _NATURAL])


def number_tree(form: Number) -> Tree | None:
    """The JSON texts of the numbers of `form`; None if its multipleOf is not a power of ten. Raises
    UnsupportedSchema for bounds with more than MAX_PLACES decimal places."""
    form = _steps(form)
    if form.multiple_of is not None:
        return _multiples(form)
    if form.integer:
        low, high = whole_bounds(form)
        return ANY_INTEGER if low is None and high is None else _integers(low, high)
    if form.low is None and form.high is None:
        return ANY_NUMBER
    return _decimals(form)


def _steps(form: Number) -> Number:
    """multipleOf 1 as integer, a multiple that follows from being an integer dropped."""
    step = form.multiple_of
    if step is None or step != step.to_integral_value():
        # Multiples of 0.5 or 0.01 among the integers are all of them if the step divides 1.
        if step is not None and form.integer and Decimal(1) % step == 0:
            return Number(form.low, form.high, form.low_open, form.high_open, True)
        return form
    return Number(form.low, form.high, form.low_open, form.high_open, True, None if step == 1 else step)


def _multiples(form: Number) -> Tree | None:
    step = form.multiple_of
    assert step is not None
    power = step.adjusted()
    if Decimal(1).scaleb(power) != step or form.low is not None or form.high is not None:
        return None
    if power > 0:
        return choice(
            [text("0"), sequence([optional(text("-")), _POSITIVE, repeat(DIGIT, 0, None), text("0" * power)])]
        )
    return sequence([optional(text("-")), _NATURAL, optional(sequence([text("."), repeat(DIGIT, 1, -power)]))])


def _integers(low: int | None, high: int | None) -> Tree:
    """Whole numbers from `low` to `high`; 0 without a sign."""
    options: list[Tree] = []
    if high is None or high >= 0:
        options.append(_naturals(max(0, low or 0) if low is not None else 0, high))
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        options.append(sequence([text("-"), _naturals(least, None if low is None else -low)]))
    return choice(options)


def _naturals(low: int, high: int | None) -> Tree:
    """Whole numbers from `low` >= 0 to `high`, None: without bound."""
    if high is None:
        digits = str(low)
        longer = sequence([_POSITIVE, repeat(DIGIT, len(digits), None)])
        return choice([_naturals(low, 10 ** len(digits) - 1), longer])
    if low > high:
        return NOTHING
    options = []
    for length in range(len(str(low)), len(str(high)) + 1):
        least = max(low, 10 ** (length - 1) if length > 1 else 0)
        most = min(high, 10**length - 1)
        options.append(_same_length(str(least), str(most)))
    return choice(options)


def _same_length(low: str, high: str) -> Tree:
    """Digits of the length of both, between them."""
    if not low:
        return EMPTY
    free = "0" * (len(low) - 1), "9" * (len(low) - 1)
    first, last = int(low[0]), int(high[0])
    if first == last:
        return sequence([text(low[0]), _same_length(low[1:], high[1:])])
    if low[1:] == free[0] and high[1:] == free[1]:
        return sequence([_digits(first, last), repeat(DIGIT, len(low) - 1, len(low) - 1)])
    return choice(
        [
            sequence([text(low[0]), _same_length(low[1:], free[1])]),
            sequence([_digits(first + 1, last - 1), repeat(DIGIT, len(low) - 1, len(low) - 1)]),
            sequence([text(high[0]), _same_length(free[0], high[1:])]),
        ]
    )


def _digits(low: int, high: int) -> Tree:
    return chars([(0x30 + low, 0x30 + high)]) if low <= high else NOTHING


def _decimals(form: Number) -> Tree:
    """Numbers between the bounds with any number of decimal places."""
    options: list[Tree] = []
    zero = Decimal(0)
    if form.high is None or form.high > 0 or (form.high == 0 and not form.high_open):
        low, low_open = (form.low, form.low_open) if form.low is not None and form.low >= 0 else (zero, False)
        options.append(_magnitudes(low, low_open, form.high, form.high_open))
    if form.low is None or form.low < 0:
        high, high_open = (-form.high, form.high_open) if form.high is not None and form.high < 0 else (zero, True)
        farthest = None if form.low is None else -form.low
        options.append(sequence([text("-"), _magnitudes(high, high_open, farthest, form.low_open)]))
    return choice(options)


def _magnitudes(low: Decimal, low_open: bool, high: Decimal | None, high_open: bool) -> Tree:
    """Numbers from `low` >= 0 to `high` (None: no bound); open: without the bound itself."""
    below, low_places = _split(low)
    any_places = optional(sequence([text("."), repeat(DIGIT, 1, None)]))
    if high is None:
        return choice([_at(below, _from(low_places, low_open)), sequence([_naturals(below + 1, None), any_places])])
    above, high_places = _split(high)
    if below == above:
        return _at(below, _between(low_places, low_open, high_places, high_open))
    return choice(
        [
            _at(below, _from(low_places, low_open)),
            sequence([_naturals(below + 1, above - 1), any_places]),
            _at(above, _to(high_places, high_open)),
        ]
    )


def _split(value: Decimal) -> tuple[int, str]:
    """Whole part, and decimal places without trailing zeros."""
    whole, _, places = format(value, "f").partition(".")
    places = places.rstrip("0")
    if len(places) > MAX_PLACES:  # each is a level of the tree
        refuse("#", f"the bound {value} has more than {MAX_PLACES} decimal places, which is not supported")
    return int(whole), places


def _at(whole: int, places: Tree) -> Tree:
    """`whole` with `places` behind the point; no places: no point."""
    some = _not_empty(places)
    written = [sequence([text(str(whole)), text("."), some])]
    if _has_empty(places):
        written.append(text(str(whole)))
    return choice(written)


_ALL = repeat(DIGIT, 0, None)


def _from(low: str, is_open: bool) -> Tree:
    """Decimal places that are at least `low`."""
    if not low:
        if not is_open:
            return _ALL
        return sequence([repeat(text("0"), 0, None), _POSITIVE, _ALL])
    return choice([sequence([_digits(int(low[0]) + 1, 9), _ALL]), sequence([text(low[0]), _from(low[1:], is_open)])])


def _to(high: str, is_open: bool) -> Tree:
    """Decimal places that are at most `high`."""
    if not high:
        return NOTHING if is_open else repeat(text("0"), 0, None)
    return choice(
        [EMPTY, sequence([_digits(0, int(high[0]) - 1), _ALL]), sequence([text(high[0]), _to(high[1:], is_open)])]
    )


def _between(low: str, low_open: bool, high: str, high_open: bool) -> Tree:
    """Decimal places from `low` to `high`."""
    if not low:
        if not low_open:
            return _to(high, high_open)
        if not high:
            return NOTHING
    first, last = int(low[0]) if low else 0, int(high[0]) if high else 0
    if first > last or (not high and low.strip("0")):
        return NOTHING
    if first == last:
        return sequence([_digits(first, first), _between(low[1:], low_open, high[1:], high_open)])
    return choice(
        [
            sequence([_digits(first, first), _from(low[1:], low_open)]),
            sequence([_digits(first + 1, last - 1), _ALL]),
            sequence([_digits(last, last), _to(high[1:], high_open)]),
        ]
    )


def _has_empty(tree: Tree) -> bool:
    return tree != NOTHING and length_bounds(tree)[0] == 0


def _not_empty(tree: Tree) -> Tree:
    """The texts of `tree`, built by the functions above, that have at least one character."""
    if tree == EMPTY:
        return NOTHING
    if isinstance(tree, Repeat) and tree.low == 0:
        return repeat(tree.part, 1, tree.high)
    if isinstance(tree, Choice):
        return choice(_not_empty(option) for option in tree.options)
    if isinstance(tree, Sequence) and _has_empty(tree):
        # Only repetitions in a row can be empty together: at least one of them is not.
        first, others = tree.parts[0], sequence(tree.parts[1:])
        return choice([sequence([_not_empty(first), others]), _not_empty(others)])
    return tree
