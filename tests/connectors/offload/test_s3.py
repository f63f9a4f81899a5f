"""The file tier on S3, served by moto on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from llmkit_connectors.offload.block_file import header_bytes
from llmkit_connectors.offload.block_key import space_of
from llmkit_connectors.offload.file_tier import FileTier, StoreOutcome
from llmkit_connectors.offload.media import open_medium

pytest.importorskip("s3fs")
pytest.importorskip("moto")

PROMPT = list(range(1, 18))


@contextmanager
def served() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server of its own, and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(url, server)
        yield url, server
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with served() as (url, _):
        yield url


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"{url}/moto-api/", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.05)


@pytest.fixture
def options(endpoint: str) -> dict[str, Any]:
    return {"endpoint_url": endpoint, "key": "test", "secret": "test"}


@pytest.fixture
def bucket(endpoint: str) -> str:
    return new_bucket(endpoint)


def new_bucket(endpoint: str) -> str:
    name = f"llmkit-{uuid.uuid4().hex[:12]}"
    request = urllib.request.Request(f"{endpoint}/{name}", method="PUT", headers={"Authorization": "AWS test:test"})
    urllib.request.urlopen(request, timeout=10).close()
    return name


def test_a_tier_on_s3_keeps_its_limit_and_survives_a_restart(blocks: Any, bucket: str, options: dict[str, Any]):
    limit = 3 * (blocks.size + header_bytes(blocks.size))
    tier = FileTier(open_medium(f"s3://{bucket}/kv", options), limit)
    out = bytearray(blocks.size)
    keys = [blocks.key(number) for number in range(5)]
    assert not tier.load(blocks.space, keys[0], memoryview(out))
    for key in keys:
        assert tier.store(blocks.space, key, memoryview(blocks.payload(key))) is StoreOutcome.STORED
    assert tier.store(blocks.space, keys[4], memoryview(blocks.payload(keys[4]))) is StoreOutcome.THERE
    again = FileTier(open_medium(f"s3://{bucket}/kv", options), limit)
    hashes = [key.content_hash for key in keys]
    assert again.find([blocks.space], 0, hashes) == hashes[2:]
    assert again.find([blocks.space], 0, hashes, only_leading=True) == []
    assert again.find([space_of("another model", 0, 1)], 0, hashes) == []
    for key in keys[2:]:
        assert again.load(blocks.space, key, memoryview(out))
        assert out == blocks.payload(key)
    key = blocks.key(7)
    assert again.store(blocks.space, key, memoryview(blocks.payload(key))) is StoreOutcome.STORED
    assert (again.stats().num_files, again.stats().evicted) == (3, 1)


def test_damaged_objects_are_misses_and_are_removed(blocks: Any, bucket: str, options: dict[str, Any]):
    medium = open_medium(f"s3://{bucket}/kv", options)
    tier = FileTier(medium, None)
    key = blocks.key(1)
    tier.store(blocks.space, key, memoryview(blocks.payload(key)))
    [file] = list(medium.files())
    data = bytearray(file.size)
    medium.read_into(file.name, [memoryview(data)])
    medium.write(file.name, [data[:500]])
    assert not tier.load(blocks.space, key, memoryview(bytearray(blocks.size)))
    assert list(medium.files()) == []


def test_a_bucket_that_is_not_there_is_a_miss_and_a_skipped_store(blocks: Any, options: dict[str, Any]):
    tier = FileTier(open_medium("s3://no-such-bucket-anywhere/kv", options), 10_000)
    key = blocks.key(1)
    assert tier.store(blocks.space, key, memoryview(blocks.payload(key))) is StoreOutcome.FAILED
    assert not tier.load(blocks.space, key, memoryview(bytearray(blocks.size)))
    assert tier.find([blocks.space], 0, [key.content_hash]) == []


@pytest.mark.skipif(not os.environ.get("LLMKIT_DEEP_TESTS"), reason="takes seconds: LLMKIT_DEEP_TESTS=1")
def test_a_server_that_dies_leaves_misses_and_skipped_stores(blocks: Any, make_rig: Callable[..., Any]):
    """In the middle of its life, with blocks that the tier knows it has; an engine computes what it cannot load."""
    quick = {"config_kwargs": {"retries": {"max_attempts": 1}, "connect_timeout": 2, "read_timeout": 2}}
    with served() as (url, server):
        options = {"endpoint_url": url, "key": "test", "secret": "test"} | quick
        place = f"s3://{new_bucket(url)}/kv"
        tier = FileTier(open_medium(place, options), None)
        key, other = blocks.key(1), blocks.key(2)
        assert tier.store(blocks.space, key, memoryview(blocks.payload(key))) is StoreOutcome.STORED
        first = make_rig(url=place, storage_options=options)
        assert first.serve(PROMPT) == 0
        second = make_rig(url=place, storage_options=options)
        server.kill()
        server.wait()
        assert not tier.load(blocks.space, key, memoryview(bytearray(blocks.size)))
        assert tier.store(blocks.space, other, memoryview(blocks.payload(other))) is StoreOutcome.FAILED
        assert tier.find([blocks.space], 0, [key.content_hash]) == []
        assert second.serve(PROMPT) == 0


def test_engines_share_a_bucket(make_rig: Callable[..., Any], bucket: str, options: dict[str, Any]):
    settings = {"url": f"s3://{bucket}/shared", "storage_options": options}
    one, two = make_rig(**settings), make_rig(**settings)
    assert one.serve(PROMPT) == 0
    assert two.serve([*PROMPT, 1, 2, 3, 4]) == 16
    assert two.worker._files.stats().hits == 4
