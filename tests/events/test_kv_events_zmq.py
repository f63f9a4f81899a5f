"""KV events over ZMQ, received by real subscribers."""

from __future__ import annotations

import socket
import threading
import time

import msgspec
import pytest
import zmq

from llmkit import LLM, SamplingParams
from llmkit.config import load_config
from llmkit.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, short_hash
from llmkit.kv_cache.hashing import block_hashes
from llmkit.registry import Registry
from llmkit_events.kv_events_zmq import ZmqEventOptions
from llmkit_events.zmq_publisher import END_OF_REPLAY, ZmqPublisher

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
ANYWHERE = "tcp://127.0.0.1:*"
STORED = BlockStored(block_hashes=(b"\1" * 32,), parent_block_hash=None, token_ids=[1, 2], block_size=2)


@pytest.fixture
def sockets():
    with zmq.Context() as context:
        made = []

        def make(kind, endpoint, topic=b""):
            one = context.socket(kind)
            one.setsockopt(zmq.LINGER, 0)
            one.setsockopt(zmq.RCVTIMEO, 10_000)
            if kind == zmq.SUB:
                one.subscribe(topic)
            one.connect(endpoint)
            made.append(one)
            return one

        yield make
        for one in made:
            one.close()


@pytest.fixture
def publisher():
    made = []

    def make(**options):
        made.append(ZmqPublisher(ZmqEventOptions(**{"endpoint": ANYWHERE, "replay_endpoint": ANYWHERE} | options)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def replayed(sockets, publisher, first=0):
    """Sequence number and events of every message from `first` on, as far as they are kept."""
    asking = sockets(zmq.DEALER, publisher.replay_endpoint)
    asking.send_multipart((b"", first.to_bytes(8, "big")))
    messages = []
    while True:
        empty, number, payload = asking.recv_multipart()
        assert empty == b""
        if number == END_OF_REPLAY:
            assert payload == b""
            return messages
        messages.append((int.from_bytes(number, "big"), decoded(payload)))


def decoded(payload):
    stamp, events, rank = msgspec.msgpack.decode(payload)
    assert abs(stamp - time.time()) < 60
    assert rank == 0
    return events


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def received(subscriber, publisher):
    """The first message that a fresh subscriber gets: those before it has arrived are nobody's."""
    subscriber.setsockopt(zmq.RCVTIMEO, 20)
    for _ in range(500):
        publisher.publish(STORED)
        try:
            return subscriber.recv_multipart()
        except zmq.Again:
            continue
    raise AssertionError("nothing arrives")


def test_a_subscriber_gets_topic_number_and_maps(publisher, sockets):
    made = publisher(topic="kv@1")
    subscriber = sockets(zmq.SUB, made.endpoint, b"kv")
    topic, number, payload = received(subscriber, made)
    assert (topic, len(number)) == (b"kv@1", 8)
    assert decoded(payload)[0] == {
        "type": "BlockStored",
        "block_hashes": [int.from_bytes(b"\1" * 8, "big")],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group": 0,
    }


def test_everything_can_be_asked_for_again_in_order(publisher, sockets):
    made = publisher()
    events = [STORED, BlockRemoved(block_hashes=(b"\2" * 32,)), AllBlocksCleared()]
    for position, event in enumerate(events):
        made.publish(event)
        until(lambda position=position: len(made._sent) > position)
    messages = replayed(sockets, made)
    assert [number for number, _ in messages] == [0, 1, 2]
    assert [event["type"] for _, (event,) in messages] == ["BlockStored", "BlockRemoved", "AllBlocksCleared"]
    assert [number for number, _ in replayed(sockets, made, 2)] == [2]
    assert replayed(sockets, made, 2**63) == []


def test_only_so_many_messages_are_kept(publisher, sockets):
    made = publisher(buffer_steps=2)
    for number in range(5):
        made.publish(STORED)
        until(lambda number=number: made._next > number)
    assert [number for number, _ in replayed(sockets, made)] == [3, 4]


def test_a_request_that_makes_no_sense_is_passed_over(publisher, sockets, caplog):
    made = publisher()
    made.publish(STORED)
    until(lambda: made._sent)
    for nonsense in ((b"",), (b"", b"123"), (b"x", b"\0" * 8), (b"", b"\0" * 8, b"")):
        asking = sockets(zmq.DEALER, made.replay_endpoint)
        asking.send_multipart(nonsense)
    assert len(replayed(sockets, made)) == 1
    until(lambda: caplog.text.count("not understood") == 4)


def test_a_full_queue_drops_events_at_once_and_leaves_out_a_number(publisher, sockets, monkeypatch, caplog):
    """The thread is held up at its first message, as by a machine that is busy elsewhere."""
    held, go_on = threading.Event(), threading.Event()
    send = ZmqPublisher._send_queued

    def slow(self):
        held.set()
        go_on.wait(10)
        send(self)

    monkeypatch.setattr(ZmqPublisher, "_send_queued", slow)
    made = publisher(max_queue_size=3)
    made.publish(STORED)
    assert held.wait(10)
    start = time.perf_counter()
    for _ in range(1000):
        made.publish(STORED)
    assert time.perf_counter() - start < 1
    assert made.num_dropped == 998
    go_on.set()
    until(lambda: made._sent)
    made.publish(STORED)
    until(lambda: len(made._sent) == 2)
    assert [(number, len(events)) for number, events in replayed(sockets, made)] == [(1, 3), (2, 1)]
    assert "998 so far" in caplog.text


def test_what_is_queued_is_sent_before_it_closes_and_nothing_is_left(publisher, sockets):
    made = publisher(topic="t")
    subscriber = sockets(zmq.SUB, made.endpoint)
    received(subscriber, made)
    subscriber.setsockopt(zmq.RCVTIMEO, 5000)
    made.publish(AllBlocksCleared())
    made.close()
    made.close()
    assert not made._thread.is_alive()
    kinds = []
    while "AllBlocksCleared" not in kinds:
        kinds += [event["type"] for event in decoded(subscriber.recv_multipart()[2])]
    made.publish(STORED)  # too late, and harmless
    port = int(made.endpoint.rpartition(":")[2])
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))


def test_an_endpoint_that_cannot_be_bound_is_an_error_and_leaves_nothing():
    before = threading.active_count()
    with pytest.raises(zmq.ZMQError):
        ZmqPublisher(ZmqEventOptions(endpoint=ANYWHERE, replay_endpoint="tcp://*:no-port"))
    assert threading.active_count() == before


def test_an_engine_publishes_what_its_prefix_cache_holds(sockets):
    config = {"publisher": "zmq", "endpoint": ANYWHERE, "replay_endpoint": ANYWHERE}
    settings = {
        "load_format": "dummy",
        "overrides": TINY,
        "num_blocks": 9,
        "kv_events_config": config,
    }

    plugins = load_config(flags={"kv_events_config": config}, env={}, origin="argument").config.plugins
    registry = Registry.discover(plugins)
    prompt, other = list(range(40)), list(range(50, 90))
    with LLM(**settings, registry=registry) as llm:
        made = registry.load("extension", "kv-events-zmq").front_door.publisher
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        for tokens in (prompt, other, [*range(90, 120), *range(60)]):
            llm.generate(tokens, params, use_tqdm=False)
        llm.reset_prefix_cache()
        until(lambda: not made._queue and made._sent and "AllBlocksCleared" in str(made._sent[-1]))
        events = [event for _, some in replayed(sockets, made) for event in some]
    stored = [event for event in events if event["type"] == "BlockStored"]
    assert stored[0]["block_hashes"] == [short_hash(one) for one in block_hashes(prompt, 16)]
    assert stored[0]["token_ids"] == prompt[:32]
    assert stored[0]["parent_block_hash"] is None
    assert any(event["type"] == "BlockRemoved" for event in events)
    assert events[-1] == {"type": "AllBlocksCleared"}
    assert not made._thread.is_alive()


@pytest.mark.parametrize(
    ("config", "publisher", "options"),
    [
        ({}, "zmq", {}),
        ({"publisher": "zmq", "topic": "t"}, "zmq", {"topic": "t"}),
        ({"enable_kv_cache_events": True, "hwm": 5}, "zmq", {"hwm": 5}),
        ({"enable_kv_cache_events": False, "topic": "t"}, None, None),
        ({"publisher": "null"}, None, None),
    ],
)
def test_the_combined_flag(config, publisher, options):
    loaded = load_config(flags={"kv_events_config": msgspec.json.encode(config).decode()}, env={}).config
    assert loaded.kv_cache.event_publisher == publisher
    assert loaded.plugins.options.get("extension", {}).get("kv-events-zmq", {} if options == {} else None) == options
