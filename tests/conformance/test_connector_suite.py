"""Every check of the suite for connectors notices what it is there for."""

from __future__ import annotations

import inspect
import threading
from pickle import PicklingError
from types import SimpleNamespace

import pytest

from llmkit.hookspecs.connector import LoadOffer, TransferPlan, TransferReport
from llmkit.testing import connector_rig
from llmkit.testing.conformance import connector_suite as suite
from llmkit.testing.connector_rig import ConnectorRig
from llmkit.testing.memory_connector import MemoryConnector, MemoryScheduler, MemoryStore, MemoryWorker

CHECKS = [name for name in vars(suite) if name.startswith("test_")]


class Deciding(MemoryScheduler):
    pass


class Moving(MemoryWorker):
    pass


def connector_of(scheduler=Deciding, worker=Moving, *, asynchronous=True, delay=2):
    """What the suite is given: a connector whose halves are of these classes, with one store for all it builds."""
    store = MemoryStore()

    class Made(MemoryConnector):
        def scheduler_half(self, context):
            return scheduler(store, context, asynchronous)

        def worker_half(self, context):
            return worker(store, context, delay)

        def damage_for_tests(self):
            """What is damaged is found out: it cannot be loaded any more."""
            store.fails = lambda _: True

    return lambda: Made(store)


def run(check, create):
    """Run one check of the suite, for each of its parameters."""
    function = getattr(suite, check)
    marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
    seeds = marks[0].args[1] if marks else [None]
    for seed in seeds:
        made = []

        def make(layout=None, model="a model", *, made=made):
            made.append(ConnectorRig(create, layout or suite.small_layout(), model))
            return made[-1]

        given = {
            "conformance": SimpleNamespace(create=create, device="cpu"),
            "rigs": make,
            "fingerprint": "a model",
            "seed": seed,
        }
        function(**{name: given[name] for name in inspect.signature(function).parameters})
        for rig in made:
            rig.close()


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_right_one_passes(check, asynchronous):
    create = connector_of(asynchronous=asynchronous)
    if check == "test_aborted_while_loading" and not asynchronous:
        with pytest.raises(pytest.skip.Exception, match="asynchronously"):
            run(check, create)
    else:
        run(check, create)


class OtherBytes(Moving):
    def _load(self, moves):
        failed = super()._load(moves)
        for _, block, _ in moves[-1:]:
            self._pages(len(self._caches) - 1, block)[-1].neg_()
        return failed


class LeavesOneLayerOut(Moving):
    def _load(self, moves):
        kept = self._pages(0, moves[0][1]).clone()
        failed = super()._load(moves)
        self._pages(0, moves[0][1]).copy_(kept)
        return failed


class MixesModels(Deciding):
    def __init__(self, store, context, asynchronous):
        super().__init__(store, suite_context(context), asynchronous)


class MixesModelsToo(Moving):
    def __init__(self, store, _context, delay):
        super().__init__(store, SimpleNamespace(rank=0, world_size=1, fingerprint="all", role="both"), delay)


def suite_context(context):
    fields = ("layout", "world_size", "max_model_len", "role", "new_id", "max_held_blocks")
    return SimpleNamespace(fingerprint="all", **{name: getattr(context, name) for name in fields})


class OffersTooMuch(Deciding):
    def offer(self, request, num_computed_tokens):
        offer = super().offer(request, num_computed_tokens)
        return LoadOffer(offer.num_tokens + self._context.layout.block_size, True)


class OffersParts(Deciding):
    def offer(self, request, num_computed_tokens):
        return LoadOffer(super().offer(request, num_computed_tokens).num_tokens + 1, True)


class ForgetsWhatTheCacheHas(Deciding):
    def offer(self, request, num_computed_tokens):  # noqa: ARG002
        return super().offer(request, 0)


class Unending(Moving):
    def __init__(self, store, context, delay):
        super().__init__(store, context, delay)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class Unresettable(Deciding):
    def reset(self):
        pass


class LosesLoads(Moving):
    def report(self):
        return TransferReport(frozenset(), super().report().released)


class LosesCancelled(Moving):
    def cancel(self, load_ids):
        self._jobs = [job for job in self._jobs if job.load_id not in load_ids]


class KeepsHolds(Moving):
    def report(self):
        report = super().report()
        return TransferReport(report.loaded, frozenset(), report.failed_blocks)


class CannotBePickled(Deciding):
    def plan_transfers(self, step):
        plan = super().plan_transfers(step)
        return plan and TransferPlan(lambda: plan.payload, plan.holds)


class Fussy(Deciding):
    def update(self, report):
        for hold_id in report.released:
            del self._held[hold_id]


class StoresTooLate(Moving):
    """Copies blocks that it holds no more."""

    def _save(self, moves, num_resets):
        self._late = getattr(self, "_late", [])
        self._late.append(moves)
        if len(self._late) > 1:
            super()._save(self._late[-2], num_resets)
        return set()


class Hopeful(Deciding):
    """Offers a block more than it has, where it has any; that fails, and is computed."""

    def offer(self, request, num_computed_tokens):
        offer = super().offer(request, num_computed_tokens)
        size = self._context.layout.block_size
        most = (request.num_tokens - 1) // size * size - num_computed_tokens
        return LoadOffer(min(offer.num_tokens + size, most) if offer.num_tokens else 0, offer.asynchronous)


class StoresAcrossAReset(Moving):
    def _save(self, moves, num_resets):  # noqa: ARG002
        return super()._save(moves, self._store.num_resets)


class Resurrects(Moving):
    """Damaged blocks are loaded all the same."""

    def is_lost(self, block_hash):  # noqa: ARG002
        return False


class ClosesOnce(Moving):
    def close(self):
        del self._jobs
        super().close()


BYTES = "test_what_was_stored_is_loaded_byte_for_byte"
ENGINE = "test_a_whole_engine_answers_as_without_it"


@pytest.mark.parametrize(
    ("check", "halves"),
    [
        (BYTES, {"worker": OtherBytes}),
        (BYTES, {"worker": LeavesOneLayerOut}),
        (BYTES, {"worker": KeepsHolds}),
        (BYTES, {"worker": LosesLoads}),
        (BYTES, {"scheduler": CannotBePickled}),
        (BYTES, {"scheduler": OffersParts}),
        ("test_what_is_offered_can_be_loaded", {"scheduler": Hopeful}),
        ("test_nothing_is_offered_that_was_not_stored", {"scheduler": OffersTooMuch}),
        ("test_nothing_of_another_model_is_offered", {"scheduler": MixesModels, "worker": MixesModelsToo}),
        ("test_what_is_in_the_cache_already_is_not_offered_again", {"scheduler": ForgetsWhatTheCacheHas}),
        ("test_no_thread_outlives_close", {"worker": Unending}),
        ("test_reset", {"scheduler": Unresettable}),
        ("test_reset_while_blocks_are_stored", {"worker": StoresAcrossAReset}),
        ("test_aborted_while_loading", {"worker": LosesCancelled}),
        ("test_arguments_that_make_no_sense", {"scheduler": Fussy}),
        ("test_damaged_data", {"worker": Resurrects}),
        ("test_halves_are_independent_and_close_twice", {"worker": ClosesOnce}),
        (ENGINE, {"worker": StoresTooLate}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(half.__name__ for half in value.values()),
)
def test_a_wrong_one_is_noticed(check, halves, monkeypatch):
    monkeypatch.setattr(connector_rig, "PATIENCE_S", 0.2)
    with pytest.raises((AssertionError, AttributeError, KeyError, PicklingError)):
        run(check, connector_of(**halves))
