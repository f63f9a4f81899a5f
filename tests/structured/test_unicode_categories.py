"""The general categories of Unicode: what is in them, and that finding that out is bounded where others wait."""

from __future__ import annotations

import random
import unicodedata
from time import thread_time

import pytest

from llmkit.grammars.effort import DOOR_S, Effort, TooMuchEffort
from llmkit_structured import unicode_categories
from llmkit_structured.regex_syntax import whole
from llmkit_structured.unicode_categories import unicode_class

NAMES = ("L", "Lu", "Ll", "Lo", "M", "N", "Nd", "P", "Pd", "S", "Sm", "Z", "C", "Cc", "Cf", "Co", "Cn")


@pytest.fixture
def _nothing_known() -> None:
    unicode_class.cache_clear()
    unicode_categories._runs.cache_clear()


@pytest.mark.parametrize("name", NAMES)
def test_they_hold_what_the_database_says(name: str) -> None:
    found = unicode_class(name)
    assert found is not None
    codes = [*range(0x3000), *random.Random(1).sample(range(0x3000, 0x110000), 5000), 0x10FFFF]
    for character in map(chr, (code for code in codes if not 0xD800 <= code < 0xE000)):
        assert (character in found) == unicodedata.category(character).startswith(name), hex(ord(character))


def test_what_is_no_category() -> None:
    assert [unicode_class(name) for name in ("Greek", "l", "Lx", "")] == [None] * 4


@pytest.mark.usefixtures("_nothing_known")
def test_many_of_them_cost_no_more_than_there_is_to_spend() -> None:
    """Three hundred characters took five seconds at the door once. What one constraint has found out, others have."""
    source = "".join(rf"[\p{{{name}}}\P{{{name}}}]" for name in NAMES)
    start = thread_time()
    tries = 0
    while True:
        tries += 1
        try:
            with Effort(DOOR_S).limited():
                whole(source)
            break
        except TooMuchEffort:
            assert thread_time() - start < 10 * DOOR_S * tries
    assert thread_time() - start < 2.0
