"""What the offload connector saves: time to the first token of a long prompt whose blocks are in host memory or in
files, beside computing them again; and how fast blocks are stored and loaded.

    python benchmarks/offload.py [--model MODEL] [--tokens 2048] [--runs 5] [--folder FOLDER] [--s3]

Prints JSON, medians with [least, greatest]. The KV cache has room for two prompts, and three take turns, so each finds
nothing of its own in the cache. "memory": the blocks are in the host tier. "files": the host tier has room for few
blocks, so they come from files in FOLDER (a temporary one by default), which the system may have in its page cache.
"recompute": the same engine after the connector was made to forget. The three take turns within each run.

With --s3 also files in S3, served by moto_server (moto[server], s3fs) on this machine, and the rates at which one
thread and eight write and read there: what the protocol, its client and this server cost, without a network.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from llmkit import LLM, SamplingParams
from llmkit.kv_cache.layout import KVCacheLayout
from llmkit_connectors.offload.block_key import BlockKey, space_of
from llmkit_connectors.offload.cache_blocks import cache_blocks
from llmkit_connectors.offload.file_tier import FileTier
from llmkit_connectors.offload.folder import Folder
from llmkit_connectors.offload.host_memory import HostMemory
from llmkit_connectors.offload.media import open_medium

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


def prompts(num_tokens: int) -> list[list[int]]:
    """Three prompts that have no block in common."""
    return [[(i * 31 + first * 977) % 40_000 + 10 for i in range(num_tokens)] for first in (1, 2, 3)]


def engine(model: str, num_tokens: int, **options: Any) -> LLM:
    settings: dict[str, Any] = {f"plugins.connector.offload.{name}": value for name, value in options.items()}
    num_blocks = 2 * (num_tokens // 16) + 1  # block 0 is never handed out
    return LLM(model, connector="offload", max_model_len=num_tokens + 64, num_blocks=num_blocks, **settings)


def first_token_s(llm: LLM, prompt: list[int], expected_hits: int | None) -> float:
    """Seconds to the first token; checks that as many tokens were loaded as the measurement is about."""
    before = llm.stats().external_hit_tokens
    start = time.perf_counter()
    [output] = llm.generate(prompt, ONE_TOKEN)
    seconds = time.perf_counter() - start
    loaded = llm.stats().external_hit_tokens - before
    if output.error is not None or (expected_hits is not None and loaded != expected_hits):
        raise RuntimeError(f"{loaded} tokens were loaded instead of {expected_hits}; {output.error}")
    settle(llm)
    return seconds


def settle(llm: LLM) -> None:
    """Let stores end, so that none runs into the next measurement."""
    llm.engine.core.settle_transfers(60.0)


def loadable_tokens(num_tokens: int) -> int:
    return (num_tokens - 1) // 16 * 16


def store(model: str, num_tokens: int, **place: Any) -> None:
    with engine(model, num_tokens, **place) as storing:
        for prompt in prompts(num_tokens):
            first_token_s(storing, prompt, None)


def measure(model: str, num_tokens: int, runs: int, folder: str) -> dict[str, list[float]]:
    turns = prompts(num_tokens)
    loadable = loadable_tokens(num_tokens)
    store(model, num_tokens, url=folder)
    seconds: dict[str, list[float]] = {"recompute": [], "memory": [], "files": []}
    with engine(model, num_tokens) as memory, engine(model, num_tokens, url=folder, host_gib=0.01) as files:
        for prompt in turns:
            first_token_s(memory, prompt, None)
            first_token_s(files, prompt, None)
        for _ in range(runs):
            for prompt in turns:
                seconds["memory"].append(first_token_s(memory, prompt, loadable))
                seconds["files"].append(first_token_s(files, prompt, loadable))
            if not memory.reset_prefix_cache():
                raise RuntimeError("the prefix cache could not be reset")
            for prompt in turns:
                seconds["recompute"].append(first_token_s(memory, prompt, 0))
    return seconds


def measure_s3(model: str, num_tokens: int, runs: int, options: dict[str, Any]) -> list[float]:
    place = {"url": "s3://blocks/first-token", "storage_options": options}
    store(model, num_tokens, **place)
    with engine(model, num_tokens, host_gib=0.01, **place) as llm:
        turns = prompts(num_tokens) * (runs + 1)
        seconds = [first_token_s(llm, prompt, loadable_tokens(num_tokens)) for prompt in turns]
    return seconds[3:]  # the first round opens connections


def copy_speeds(layout: KVCacheLayout, runs: int, folder: str) -> dict[str, float]:
    """GB/s of copies between a cache of this layout, host memory and files, one thread each."""
    spec = layout.groups[0].spec
    shape = (layout.num_blocks * layout.pages_per_block, 2, layout.page_size, spec.num_kv_heads, spec.head_size)
    caches = [torch.rand(shape).to(spec.dtype) for _ in range(sum(len(group.layers) for group in layout.groups))]
    blocks = cache_blocks(layout, caches)
    size = blocks.payload_bytes[0]
    count = layout.num_blocks - 1
    memory = HostMemory(count, size, pinned=False)
    slots = [memory.slot(number, size) for number in range(count)]
    copies = list(enumerate(slots, start=1))
    tier, space = FileTier(Folder(folder), None), space_of("benchmark", 0, 1)
    keys = [BlockKey(0, number.to_bytes(32, "big")) for number in range(count)]

    def write() -> None:
        for key, slot in zip(keys, slots, strict=True):
            tier.store(space, key, slot.data)

    def read() -> None:
        for key, slot in zip(keys, slots, strict=True):
            if not tier.load(space, key, slot.data):
                raise RuntimeError("a block is missing")

    blocks.save(0, copies)  # commits the memory
    speeds = {
        "cache_to_memory": rate(lambda: blocks.save(0, copies), count * size, runs),
        "memory_to_cache": rate(lambda: blocks.restore(0, copies), count * size, runs),
        "memory_to_files": rate(write, count * size, 1),
        "files_to_memory": rate(read, count * size, runs),
    }
    return {name: round(speed / 1e9, 2) for name, speed in speeds.items()}


@contextmanager
def s3_server() -> Iterator[dict[str, Any]]:
    """`storage_options` for a server with the bucket "blocks" on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "test", "secret": "test"}
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{options['endpoint_url']}/moto-api/", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("moto_server did not start; pip install 'moto[server]' s3fs") from None
                time.sleep(0.1)
        import s3fs

        s3fs.S3FileSystem(**options).mkdir("blocks")
        yield options
    finally:
        server.terminate()
        server.wait()


def s3_speeds(block_bytes: int, num_blocks: int, runs: int, options: dict[str, Any]) -> dict[str, float]:
    """GB/s of blocks of this size, written and read by one thread and by eight."""
    payloads = [bytearray(torch.randint(0, 256, (block_bytes,), dtype=torch.uint8).numpy()) for _ in range(8)]
    speeds = {}
    for num_threads in (1, 8):
        tier = FileTier(open_medium(f"s3://blocks/threads-{num_threads}", options), None)
        space = space_of("benchmark", 0, 1)
        numbers = range(num_blocks if num_threads > 1 else num_blocks // 4)

        def write(number: int, tier: FileTier = tier, space: bytes = space) -> None:
            tier.store(space, BlockKey(0, number.to_bytes(32, "big")), memoryview(payloads[number % 8]))

        def read(number: int, tier: FileTier = tier, space: bytes = space) -> None:
            if not tier.load(space, BlockKey(0, number.to_bytes(32, "big")), memoryview(bytearray(block_bytes))):
                raise RuntimeError("a block is missing")

        with ThreadPoolExecutor(num_threads) as pool:
            size = len(numbers) * block_bytes
            for name, work, times in (("write", write, 1), ("read", read, runs)):

                def all_of_them(pool: ThreadPoolExecutor = pool, work: Any = work, numbers: range = numbers) -> None:
                    list(pool.map(work, numbers))

                speeds[f"{name}_{num_threads}"] = round(rate(all_of_them, size, times) / 1e9, 3)
    return speeds


def rate(action: Callable[[], None], num_bytes: int, runs: int) -> float:
    """Bytes per second, median."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return num_bytes / statistics.median(times)


def summary(seconds: list[float]) -> list[float]:
    return [round(value, 3) for value in (statistics.median(seconds), min(seconds), max(seconds))]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to first token from host memory and files beside recomputing.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", help="where the block files go; default: a temporary folder")
    parser.add_argument("--s3", action="store_true", help="also measure S3, served by moto_server on this machine")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        seconds = measure(arguments.model, arguments.tokens, arguments.runs, folder)
        with engine(arguments.model, arguments.tokens) as llm:
            layout = llm.engine.layout
        speeds = copy_speeds(layout, arguments.runs, str(Path(folder) / "copies"))
    result: dict[str, Any] = {
        "prompt_tokens": arguments.tokens,
        "block_mib": round(layout.block_bytes / (1 << 20), 3),
        "gb_per_s": speeds,
    }
    if arguments.s3:
        with s3_server() as options:
            seconds["s3"] = measure_s3(arguments.model, arguments.tokens, arguments.runs, options)
            result["s3_gb_per_s"] = s3_speeds(layout.block_bytes, 64, arguments.runs, options)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    result["first_token_s"] = {name: summary(values) for name, values in seconds.items()}
    recompute = medians.pop("recompute")
    result["recompute_over"] = {name: round(recompute / median, 1) for name, median in medians.items()}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
