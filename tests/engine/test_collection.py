"""The garbage collector rests while an engine starts, and only then."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from llmkit.engine import collection
from llmkit.engine.collection import collection_paused


class Node:
    """Something that can be part of a cycle."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(collection, "_settled", set())
    yield
    gc.unfreeze()
    gc.enable()


def test_it_rests_and_goes_on() -> None:
    with collection_paused("start"):
        assert not gc.isenabled()
    assert gc.isenabled()


def test_only_the_first_start_leaves_its_objects_out_of_later_collections() -> None:
    before = gc.get_freeze_count()
    with collection_paused("start"):
        pass
    frozen = gc.get_freeze_count()
    assert frozen > before
    kept = [Node() for _ in range(10)]
    with collection_paused("start"):
        pass
    assert gc.get_freeze_count() <= frozen
    assert len(kept) == 10


def test_garbage_from_before_is_not_kept() -> None:
    node = weakref.ref(Node())
    with collection_paused("start"):
        pass
    assert node() is None


def test_a_start_that_fails_leaves_nothing_behind() -> None:
    before = gc.get_freeze_count()
    with pytest.raises(ValueError, match="no model"), collection_paused("start"):
        raise ValueError("no model")
    assert gc.isenabled()
    assert gc.get_freeze_count() <= before


def test_who_has_turned_it_off_keeps_it_off() -> None:
    gc.disable()
    with collection_paused("start"):
        assert not gc.isenabled()
    assert not gc.isenabled()
