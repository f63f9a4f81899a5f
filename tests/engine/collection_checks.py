"""The garbage collector rests while an engine starts, and only then.

`test_collection.py` runs this in a process of its own.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from llmkit.engine import collection
from llmkit.engine.collection import collection_paused, freeze_imports, freeze_later_imports, set_aside


class Node:
    """Something that can be part of a cycle."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(collection, "_frozen", False)
    monkeypatch.setattr(collection, "_owned", True)
    monkeypatch.setattr(collection, "_engine_before", False)
    gc.unfreeze()
    yield
    gc.enable()


def test_it_rests_and_goes_on() -> None:
    with collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_goes_on_after_a_start_that_failed() -> None:
    with pytest.raises(ValueError, match="no model"), collection_paused():
        raise ValueError("no model")
    assert gc.isenabled()


def test_only_what_was_there_before_the_first_engine_is_kept_out_of_collections() -> None:
    before = gc.get_freeze_count()
    for _ in range(2):
        with collection_paused():
            freeze_imports()
            node = Node()
        seen = weakref.ref(node)
        del node
        gc.collect()
        assert seen() is None
    assert gc.get_freeze_count() > before


def test_libraries_that_come_later_are_kept_out_as_well() -> None:
    """A grammar library and what it brings along: a collection that walked over them took 113 ms, beside the steps."""
    with collection_paused():
        freeze_imports()
    before = gc.get_freeze_count()
    later = [[number] for number in range(1000)]
    freeze_later_imports()
    assert gc.get_freeze_count() >= before + len(later)


def test_where_nothing_is_frozen_nothing_is_later() -> None:
    freeze_later_imports()
    assert gc.get_freeze_count() == 0


def test_what_an_application_has_is_not_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "_owned", False)
    node = Node()
    seen = weakref.ref(node)
    with collection_paused():
        freeze_imports()
    del node
    gc.collect()
    assert seen() is None


def test_garbage_from_before_is_not_kept() -> None:
    node = weakref.ref(Node())
    with collection_paused():
        freeze_imports()
    assert node() is None


def test_what_was_made_meanwhile_counts_as_old() -> None:
    """The collector used to begin with all that a start had imported, three times in a row."""
    with collection_paused():
        nodes = [Node() for _ in range(1000)]
    young = {id(thing) for generation in (0, 1) for thing in gc.get_objects(generation)}
    assert not young & {id(node) for node in nodes}
    assert gc.get_freeze_count() == 0


def test_what_others_have_frozen_stays_frozen() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with collection_paused(), set_aside():
        pass
    assert gc.get_freeze_count() >= count - 100  # some of it was dropped since


@pytest.mark.parametrize("dropped", [False, True])
def test_what_is_set_aside_is_not_looked_at_and_all_else_is(dropped: bool) -> None:
    """Until the engine ends, or is forgotten without having been closed."""
    before = weakref.ref(Node())
    with set_aside() as aside:
        gc.collect()
        assert before() is not None
        meanwhile = weakref.ref(Node())
        gc.collect()
        assert meanwhile() is None
        of_the_engine = Node()
    seen = weakref.ref(of_the_engine)
    del of_the_engine
    gc.collect()
    assert seen() is None
    assert before() is not None
    if dropped:
        del aside
    else:
        aside.end()
        aside.end()
    gc.collect()
    assert before() is None


def test_an_engine_beside_another_changes_nothing() -> None:
    with set_aside() as first:
        pass
    count = gc.get_freeze_count()
    with set_aside() as second:
        assert gc.get_freeze_count() <= count
    second.end()
    assert gc.get_freeze_count() > count / 2
    first.end()
    assert gc.get_freeze_count() == 0


def test_what_python_itself_has_frozen_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 begins with 375 objects frozen: nothing was set aside there, and full collections took 110 ms."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    node = Node()
    seen = weakref.ref(node)
    with set_aside() as aside:
        del node
        gc.collect()
        assert seen() is not None
    aside.end()
    with collection_paused():
        nodes = [Node() for _ in range(1000)]
    young = {id(thing) for generation in (0, 1) for thing in gc.get_objects(generation)}
    assert not young & {id(node) for node in nodes}


def test_it_is_looked_at_again_after_a_start_that_failed() -> None:
    with pytest.raises(ValueError, match="no weights"), set_aside():
        raise ValueError("no weights")
    assert gc.get_freeze_count() == 0


def test_an_earlier_engine_is_collected_before_a_new_one_is_loaded() -> None:
    with set_aside() as aside:
        pass
    aside.end()
    engine = weakref.ref(Node())
    with set_aside():
        assert engine() is None


def test_who_has_turned_it_off_keeps_it_off() -> None:
    gc.disable()
    with collection_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_at_the_end_of_the_process_everything_is_looked_at() -> None:
    """Bindings that count their objects (nanobind's) print what is left of them when the interpreter ends."""
    program = (
        "import gc, weakref\n"
        "from llmkit.engine.collection import collection_paused, freeze_imports, own_process\n"
        "class Node: pass\n"
        "node = Node(); node.itself = node\n"
        "seen = weakref.ref(node, lambda _: print('collected'))\n"
        "own_process()\n"
        "with collection_paused(): freeze_imports()\n"
        "import atexit\n"
        "del node; gc.collect(); print('ending')\n"
        "atexit._run_exitfuncs(); gc.collect()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout.split() == ["ending", "collected"]
