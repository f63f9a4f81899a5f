"""The digits of numbers between bounds."""

from __future__ import annotations

import random
from decimal import Decimal

import pytest

from llmkit_structured.json_numbers import number_tree
from llmkit_structured.regex_match import matches
from llmkit_structured.regex_tree import Tree
from llmkit_structured.schema_form import Number, is_multiple
from llmkit_structured.schema_refusal import UnsupportedSchema

BOUNDS = ["0", "1", "-1", "0.5", "-0.5", "9", "10", "99", "100", "-100", "3.14", "3.15", "-2.75", "0.001", "1e30"]


def tree_of(form: Number) -> Tree:
    tree = number_tree(form)
    assert tree is not None
    return tree


def meets(value: Decimal, form: Number) -> bool:
    low = form.low is None or value > form.low or (value == form.low and not form.low_open)
    high = form.high is None or value < form.high or (value == form.high and not form.high_open)
    return low and high and (not form.integer or value == value.to_integral_value())


def test_exactly_the_numbers_between_the_bounds() -> None:
    random_ = random.Random(1)

    def drawn() -> Decimal:
        if random_.random() < 0.6:
            return Decimal(random_.choice(BOUNDS))
        return Decimal(random_.randrange(-3000, 3000)) / random_.choice([1, 10, 100, 1000])

    for _ in range(400):
        low, high = (drawn() if random_.random() < 0.75 else None for _ in range(2))
        if low is not None and high is not None and low > high:
            low, high = high, low
        open_ends = random_.random() < 0.4 and low is not None, random_.random() < 0.4 and high is not None
        form = Number(low, high, *open_ends, integer=random_.random() < 0.4)
        written = tree_of(form)
        for _ in range(40):
            near = random_.choice([low, high]) or Decimal(0)
            value = near + Decimal(random_.randrange(-20, 20)) / random_.choice([1, 10, 100])
            text = format(value, "f")
            if random_.random() < 0.5 and "." in text:
                text = text.rstrip("0").rstrip(".")
            if text.startswith("-") and value == 0:
                continue
            matched = matches(written, text)
            if not meets(value, form):
                assert not matched, (form, text)
            elif not (form.integer and "." in text):
                assert matched, (form, text)


@pytest.mark.parametrize("text", ["01", "1.", ".5", "-", "1e", "1.e5", "+1", "--1", "1e+", "00", "-01", "0x1", "NaN"])
def test_no_number_that_json_has_not(text: str) -> None:
    assert not matches(tree_of(Number()), text)


def test_multiples_of_powers_of_ten() -> None:
    tens = tree_of(Number(multiple_of=Decimal(10)))
    cents = tree_of(Number(multiple_of=Decimal("0.01")))
    for text in ("0", "-20", "130", "7", "1.5", "1.25", "1.125"):
        assert matches(tens, text) == is_multiple(Decimal(text), Decimal(10)), text
        assert matches(cents, text) == is_multiple(Decimal(text), Decimal("0.01")), text
    assert number_tree(Number(multiple_of=Decimal(7))) is None
    assert tree_of(Number(integer=True, multiple_of=Decimal("0.5"))) == tree_of(Number(integer=True))


def test_bounds_of_hundreds_of_places_are_refused() -> None:
    """They once ended where Python's stack does. One of a hundred is kept."""
    with pytest.raises(UnsupportedSchema, match="the bound 1E-300 has more than 100 decimal places"):
        number_tree(Number(Decimal("1E-300"), Decimal(1), False, False))
    tree = number_tree(Number(Decimal("1E-100"), Decimal(1), False, False))
    assert tree is not None
    assert matches(tree, f"0.{'0' * 99}1")
    assert not matches(tree, f"0.{'0' * 100}9")
