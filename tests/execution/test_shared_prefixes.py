"""Rows of a step that begin with the same pages: who is found, what is kept, and what a backend is told."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from llmkit.execution.block_table import BlockTable
from llmkit.execution.shared_prefixes import PrefixFinder, PrefixGroups, prefix_specs, put_prefixes, shared_prefixes
from llmkit.hookspecs.attention import PrefixSharing

PAGE = 16
SHARING = PrefixSharing(unit=32, least_rows=3, least_bytes=0, least_row_bytes=0)
RUBBISH = 2**30


def tables(*rows: list[int]) -> Any:
    """Padded with what nobody may read."""
    width = max(map(len, rows))
    return np.array([row + [RUBBISH] * (width - len(row)) for row in rows], dtype=np.int32)


def found(rows: list[list[int]], least_saved: int = 0, spare: int = 0) -> list[tuple[list[int], int]]:
    """(members, tokens) of all groups, where each row's last page lacks `spare` tokens."""
    lens = np.array([len(row) * PAGE - spare for row in rows], dtype=np.int32)
    groups = shared_prefixes(tables(*rows), lens, PAGE, SHARING, least_saved)
    if groups is None:
        return []
    return [
        (sorted(groups.members[a:b].tolist()), tokens)
        for (a, b), tokens in zip(pairwise(groups.starts.tolist()), groups.tokens.tolist(), strict=True)
    ]


def saved(groups: list[tuple[list[int], int]]) -> int:
    return sum((len(members) - 1) * tokens for members, tokens in groups)


PREFIX = [7, 8, 9, 10, 11]


def test_rows_with_one_beginning_among_others() -> None:
    rows = [[*PREFIX, 100 + i] if i % 2 else [100 + i, 7, 8] for i in range(8)]
    assert found(rows) == [([1, 3, 5, 7], 64)]  # whole units of 32


def test_every_member_has_a_token_of_its_own() -> None:
    assert found([PREFIX[:4]] * 3) == [([0, 1, 2], 32)]
    assert found([PREFIX[:2]] * 3) == []
    assert found([PREFIX[:4]] * 3, spare=PAGE) == [([0, 1, 2], 32)]


def test_one_row_that_shares_little_does_not_take_it_from_the_others() -> None:
    rows = [*([*PREFIX, 100 + i] for i in range(5)), [7, 8, 50, 51]]
    assert found(rows) == [([0, 1, 2, 3, 4], 64)]


def test_a_short_common_beginning_of_groups_that_share_more() -> None:
    rows = [[7, 8, 20 + i // 4, 30 + i // 4, 40 + i // 4, 100 + i] for i in range(8)]
    assert sorted(found(rows)) == [([0, 1, 2, 3], 64), ([4, 5, 6, 7], 64)]


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 2, 3, 4]],
        [[*PREFIX, 1], [*PREFIX, 2]],
        [[i, *PREFIX] for i in range(5)],
        [[7, i, 8, 9] for i in range(5)],
        [[1]] * 5,
    ],
)
def test_too_little_in_common(rows: list[list[int]]) -> None:
    assert found(rows) == []


def test_what_is_saved_must_be_worth_it() -> None:
    rows = [[*PREFIX, 100 + i] for i in range(5)]
    for least, expected in ((256, 1), (257, 0)):
        assert len(found(rows, least)) == expected


def test_what_is_worth_it_depends_on_the_bytes_of_a_token() -> None:
    sharing = PrefixSharing(unit=32, least_rows=3, least_bytes=1000, least_row_bytes=100)
    assert sharing.least_saved(10, 64) == 32
    table = BlockTable(5, 8, PAGE, PAGE)
    for slot in range(5):
        table.write(slot, 0, [*PREFIX, 100 + slot])
    slots, lens = np.arange(5, dtype=np.int32), np.full(5, 90, dtype=np.int32)
    for bytes_per_token, expected in ((6, True), (5, False)):  # 250 keys, 300 keys; saved are 256
        groups = PrefixFinder(table, sharing, bytes_per_token).find(slots, lens)
        assert (groups is not None) == expected


def test_pages_larger_than_the_unit() -> None:
    lens = np.full(3, 5 * 64, dtype=np.int32)
    groups = shared_prefixes(tables(*[[*PREFIX[:4], i] for i in range(3)]), lens, 64, replace(SHARING, unit=16), 0)
    assert groups is not None
    assert groups.tokens.tolist() == [256]


def drawn(draw: random.Random) -> list[list[int]]:
    """Rows that branch off one another at random."""
    rows = [[draw.randint(0, 2) for _ in range(draw.randint(1, 9))] for _ in range(draw.randint(1, 3))]
    while len(rows) < 9:
        source = draw.choice(rows)
        rows.append(source[: draw.randint(0, len(source))] + [draw.randint(0, 99) for _ in range(draw.randint(0, 4))])
    return [row or [5] for row in rows]


def most_saved(rows: list[list[int]]) -> int:
    """Of any way to put rows into groups: what rows share follows from the pages of the first, so only beginnings of
    rows count as a group's prefix, and by the time that one is used its rows are gone."""
    prefixes = sorted({tuple(row[:n]) for row in rows for n in range(2, len(row), 2)}, key=len)

    def best(start: int, left: frozenset[int]) -> int:
        if start == len(prefixes):
            return 0
        prefix = prefixes[start]
        members = frozenset(r for r in left if len(rows[r]) > len(prefix) and tuple(rows[r][: len(prefix)]) == prefix)
        without = best(start + 1, left)
        if len(members) < 3:
            return without
        return max(without, (len(members) - 1) * len(prefix) * PAGE + best(start + 1, left - members))

    return best(0, frozenset(range(len(rows))))


@pytest.mark.parametrize("seed", range(60))
def test_random_rows(seed: int) -> None:
    """Groups are disjoint, what they share is the same for all members and shorter than each, and no choice in which
    a group takes all rows with its prefix saves more."""
    rows = drawn(random.Random(seed))
    groups = found(rows)
    members = [row for group, _ in groups for row in group]
    assert len(members) == len(set(members))
    for group, tokens in groups:
        assert len(group) >= 3
        assert tokens % 32 == 0
        pages = tokens // PAGE
        assert pages >= 1
        assert all(rows[row][:pages] == rows[group[0]][:pages] for row in group)
        assert all(len(rows[row]) * PAGE > tokens for row in group)
    assert saved(groups) == most_saved(rows)


def test_a_chain_of_many_rows() -> None:
    """Each shares a page more with the next than with the one before: a thousand pieces, one in another."""
    rows = [[*range(i + 1), 5000 + i] for i in range(900)]
    ((members, tokens),) = found(rows)
    assert abs(tokens - 450 * PAGE) <= 32
    assert len(members) * PAGE + tokens >= 899 * PAGE


class TestFinder:
    def finder(self) -> tuple[BlockTable, PrefixFinder]:
        table = BlockTable(8, 20, PAGE, PAGE)
        for slot in range(8):
            table.write(slot, 0, [1, 2, 3, 4, 10 + slot])
        return table, PrefixFinder(table, SHARING, 8)

    def find(self, finder: PrefixFinder, slots: list[int], length: int) -> PrefixGroups | None:
        return finder.find(np.array(slots, dtype=np.int32), np.full(len(slots), length, dtype=np.int32))

    def test_members_are_places_among_the_slots(self) -> None:
        groups = self.find(self.finder()[1], [5, 2, 7], 70)
        assert groups is not None
        assert sorted(groups.members.tolist()) == [0, 1, 2]
        assert groups.tokens.tolist() == [64]

    def test_it_is_kept_while_tables_grow(self) -> None:
        table, finder = self.finder()
        first = self.find(finder, [5, 2, 7], 70)
        table.write(2, 5, [50])
        assert self.find(finder, [5, 2, 7], 81) is first
        assert self.find(finder, [5, 7, 2], 81) is not first

    def test_a_slot_that_another_sequence_has_now_is_looked_at_again(self) -> None:
        table, finder = self.finder()
        assert self.find(finder, [5, 2, 7, 1], 70) is not None
        table.write(2, 0, [30, 31, 32, 33, 34])
        groups = self.find(finder, [5, 2, 7, 1], 70)
        assert groups is not None
        assert sorted(groups.members.tolist()) == [0, 2, 3]

    def test_a_page_that_was_replaced_is_looked_at_again(self) -> None:
        table, finder = self.finder()
        self.find(finder, [5, 2, 7], 70)
        table.write(2, 3, [60])
        groups = self.find(finder, [5, 2, 7], 70)
        assert groups is not None
        assert groups.tokens.tolist() == [32]


def test_what_a_backend_is_told() -> None:
    specs = prefix_specs(1, 7, SHARING)
    host = {name: np.full(shape, -5, dtype=scalar) for name, (scalar, shape) in specs.items()}
    groups = PrefixGroups(*(np.array(x, dtype=np.int32) for x in ([3, 0, 1], [0, 3], [64])))
    lens = np.array([80, 9, 90, 70, 65, 99, 1], dtype=np.int32)
    put_prefixes(host, 1, groups, np.array([0, 2, 3, 5]), lens)
    assert host["group_starts.1"].tolist() == [0, 3, 3]  # room for seven rows in groups of three
    assert host["members.1"][:3].tolist() == [5, 0, 2]
    assert host["shared_lens.1"].tolist() == [64, 0, 64, 0, 0, 64, 0]
    assert host["own_lens.1"].tolist() == [16, 9, 26, 70, 65, 35, 1]
    put_prefixes(host, 1, None, None, lens)
    assert not host["group_starts.1"].any()
    assert not host["shared_lens.1"].any()
    assert host["own_lens.1"].tolist() == lens.tolist()
