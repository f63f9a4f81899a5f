"""What is asked of a connector."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from llmkit.hookspecs.connector import Connector, LoadOffer, Retention, TransferReport, WorkerContext
from llmkit.kv_cache.layout import KVCacheLayout, KVGroup, KVSpec
from llmkit.testing.conformance.left_threads import left_threads
from llmkit.testing.conformance.target import Conformance
from llmkit.testing.connector_rig import ConnectorRig
from llmkit.testing.connectors import check_connector, random_layout

NEVER_OFFERS = "it offers nothing of what was stored, so there is no load to check"


def small_layout(num_blocks: int = 40, block_size: int = 4) -> KVCacheLayout:
    """Two layers of full attention, pages as large as blocks."""
    import torch

    return KVCacheLayout((KVGroup(KVSpec(2, 8, torch.float32), (0, 1)),), num_blocks, block_size, block_size)


@pytest.fixture
def fingerprint(request: pytest.FixtureRequest) -> str:
    """Of a model that no other run has had: a store may outlive this one."""
    return f"{request.node.name}-{random.SystemRandom().getrandbits(64):016x}"


@pytest.fixture
def rigs(conformance: Conformance, fingerprint: str) -> Iterator[Any]:
    """Makes rigs of the connector on trial, and closes them."""
    made: list[ConnectorRig] = []

    def make(layout: KVCacheLayout | None = None, model: str = "") -> ConnectorRig:
        rig = ConnectorRig(conformance.create, layout or small_layout(), model or fingerprint, conformance.device)
        made.append(rig)
        return rig

    yield make
    for rig in made:
        rig.close()


def prompt(seed: int, length: int = 21) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def loads(rig: ConnectorRig, tokens: Sequence[int]) -> int:
    """Store `tokens`, then load them. Skips if the connector does not offer what it was given."""
    rig.serve(tokens)
    loaded = rig.serve(tokens)
    if not loaded:
        pytest.skip(NEVER_OFFERS)
    return loaded


def test_halves_are_independent_and_close_twice(conformance: Conformance, rigs: Any) -> None:
    rig = rigs()
    assert rig.worker.report() == TransferReport(), "nothing was asked for, so there is nothing to report"
    rig.scheduler.reset()
    rig.close()
    rig.close()
    worker = conformance.create().worker_half(WorkerContext(0, 1, "never registered", "both"))
    worker.close()
    worker.close()


def test_no_thread_outlives_close(rigs: Any) -> None:
    def use() -> None:
        rig = rigs()
        rig.serve(prompt(1))
        rig.serve(prompt(1))
        rig.close()

    left = left_threads(use)
    assert left == [], "threads that go on when both halves are closed"


@pytest.mark.parametrize("seed", range(8))
def test_what_was_stored_is_loaded_byte_for_byte(rigs: Any, seed: int) -> None:
    """In any layout: types, pages, blocks of several pages, several groups, sliding windows."""
    layout = random_layout(random.Random(seed))
    rig = rigs(layout)
    length = 5 * layout.block_size + 1
    assert loads(rig, prompt(seed, length)) <= length - 1


def test_a_longer_prompt_with_the_same_beginning_loads_the_beginning(rigs: Any) -> None:
    rig = rigs()
    first = loads(rig, prompt(1))
    assert rig.serve([*prompt(1)[:12], *prompt(2, 9)]) in range(0, 13)
    assert rig.serve(prompt(1)) <= first


def test_what_is_offered_can_be_loaded(rigs: Any) -> None:
    """Nothing has happened since it was stored: an offer is no guess that ends in failed blocks and is computed after
    all."""
    rig = rigs()
    stored = prompt(1)
    loads(rig, stored)
    sequence = rig.sequence([*stored, *prompt(2, 9)])
    offer = rig.offer(sequence)
    rig.take_blocks(sequence, offer.num_tokens)
    if offer.num_tokens:
        load = rig.begin(sequence, offer)
        rig.until(lambda: load.load_id not in rig.pending)
        loaded = rig.check_loaded(load)
        assert loaded == offer.num_tokens, f"{offer.num_tokens} tokens were offered and {loaded} could be loaded"


def test_nothing_is_offered_that_was_not_stored(rigs: Any) -> None:
    rig = rigs()
    rig.serve(prompt(1))
    others = {
        "another prompt": prompt(2),
        "a prompt that differs in its first token": [prompt(1)[0] + 1, *prompt(1)[1:]],
        "a prompt of one token": prompt(1)[:1],
    }
    for what, tokens in others.items():
        offered = rig.offer(rig.sequence(tokens)).num_tokens
        assert offered == 0, f"for {what} {offered} tokens are offered, of which nothing was stored"


def test_nothing_of_another_model_is_offered(rigs: Any, fingerprint: str) -> None:
    rig = rigs()
    rig.serve(prompt(1))
    other = rigs(model=f"{fingerprint}-other")
    assert other.serve(prompt(1)) == 0, "what another model has stored (another fingerprint) is loaded"


def test_what_is_in_the_cache_already_is_not_offered_again(rigs: Any) -> None:
    rig = rigs()
    loads(rig, prompt(1))
    sequence = rig.sequence(prompt(1))
    for cached in (8, 20):
        offered = rig.offer(sequence, cached).num_tokens
        assert offered <= 20 - cached, f"{offered} tokens are offered behind {cached} in the cache; 20 were stored"


def test_aborted_while_loading(rigs: Any) -> None:
    """The load is reported all the same, and soon; its blocks are not written to afterwards."""
    rig = rigs()
    loads(rig, prompt(1))
    sequence = rig.sequence(prompt(1))
    offer = rig.offer(sequence)
    if not offer.asynchronous or not offer.num_tokens:
        pytest.skip("it loads nothing asynchronously")
    rig.take_blocks(sequence, offer.num_tokens)
    load = rig.begin(sequence, LoadOffer(min(offer.num_tokens, 20), True))
    rig.worker.cancel([load.load_id])
    blocks = [block for table in load.block_ids for block in table if block]
    rig.finish(sequence)
    rig.until(lambda: load.load_id not in rig.pending)
    for block in blocks:
        rig.cache.write(block, None)
    before = [rig.cache.pages(0, block).clone() for block in blocks]
    rig.serve(prompt(3))
    for block, kept in zip(blocks[:1], before[:1], strict=True):
        assert (rig.cache.pages(0, block) == kept).all(), "a load that was reported as over is written afterwards"


def test_evicted_while_it_is_looked_at(rigs: Any) -> None:
    """Whatever leaves the store between offer and load is a failed block, never wrong bytes."""
    rig = rigs()
    loads(rig, prompt(1))
    sequence = rig.sequence(prompt(1))
    offer = rig.offer(sequence)
    for seed in range(20, 30):
        rig.serve(prompt(seed))
    if not offer.num_tokens:
        pytest.skip(NEVER_OFFERS)
    rig.take_blocks(sequence, offer.num_tokens)
    load = rig.begin(sequence, offer)
    rig.until(lambda: load.load_id not in rig.pending)
    assert rig.check_loaded(load) <= offer.num_tokens


def test_restart(rigs: Any) -> None:
    """A new engine finds what was stored, or nothing; never something else."""
    rig = rigs()
    loads(rig, prompt(1))
    rig.close()
    again = rigs()
    assert again.serve(prompt(1)) <= 20
    assert again.serve(prompt(2)) == 0


def test_reset(rigs: Any) -> None:
    rig = rigs()
    loads(rig, prompt(1))
    rig.scheduler.reset()
    assert rig.offer(rig.sequence(prompt(1))).num_tokens == 0, "what was stored before a reset is offered"
    rig.serve(prompt(1))
    rig.serve(prompt(1))


def test_reset_while_blocks_are_stored(rigs: Any) -> None:
    """What is on its way when the cache is reset is of the time before, too."""
    rig = rigs()
    sequence = rig.sequence(prompt(1))
    rig.take_blocks(sequence)
    rig.compute(sequence)
    rig.scheduler.reset()
    rig.finish(sequence)
    rig.settle()
    offered = rig.offer(rig.sequence(prompt(1))).num_tokens
    assert offered == 0, f"{offered} tokens are offered that were being stored at a reset"


def test_damaged_data(conformance: Conformance, rigs: Any) -> None:
    """A connector that can damage all it has stored has `damage_for_tests()`: what is damaged then fails to load."""
    rig = rigs()
    loads(rig, prompt(1))
    connector: Connector = conformance.create()
    damage = getattr(connector, "damage_for_tests", None)
    if damage is None:
        pytest.skip("it has no damage_for_tests()")
    rig.close()
    damage()
    assert rigs().serve(prompt(1)) == 0, "damaged blocks are loaded"


def test_arguments_that_make_no_sense(rigs: Any) -> None:
    """What a connector hears of requests and ids that it does not know is of no interest to it."""
    rig = rigs()
    stranger = rig.sequence(prompt(9))
    rig.scheduler.update(TransferReport(frozenset({10**9}), frozenset({10**9 + 1}), frozenset({3}), {}, frozenset({5})))
    rig.scheduler.preempted(stranger)
    assert isinstance(rig.scheduler.request_finished(stranger, ()), Retention)
    rig.worker.cancel([10**9])
    rig.worker.wait(0.0)
    assert all(isinstance(problem, str) for problem in rig.scheduler.problems({"no_such_field": [1, {"a": None}]}))
    assert not rig.worker.report()
    rig.serve(prompt(9))


@pytest.mark.parametrize("seed", range(3))
def test_a_whole_engine_answers_as_without_it(conformance: Conformance, seed: int) -> None:
    """Under random load, aborts and preemption: the answers are right, nothing stays held, and there is no fault."""
    check_connector(conformance.create, seed, scenarios=4)
