"""Several processes on one folder, some of them killed while they write."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from llmkit_connectors.offload.block_file import header_bytes
from llmkit_connectors.offload.file_tier import FileTier
from llmkit_connectors.offload.folder import Folder

NUM_BLOCKS = 40
SIZE = 30_000
LIMIT = 25 * (SIZE + header_bytes(SIZE))

PROCESS = f"""
import random, sys
from llmkit_connectors.offload.block_key import BlockKey, space_of
from llmkit_connectors.offload.file_tier import FileTier
from llmkit_connectors.offload.folder import Folder

folder, seed, num_operations = sys.argv[1], sys.argv[2], int(sys.argv[3])
tier, space, choose = FileTier(Folder(folder), {LIMIT}), space_of("a model", 0, 1), random.Random(seed)
out = bytearray({SIZE})
print("ready", flush=True)
num_loaded = 0
for _ in range(num_operations):
    key = BlockKey(0, choose.randrange({NUM_BLOCKS}).to_bytes(32, "big"))
    payload = random.Random(f"0/{{key.content_hash.hex()}}").randbytes({SIZE})
    if choose.random() < 0.5:
        tier.store(space, key, memoryview(payload))
    elif tier.load(space, key, memoryview(out)):
        assert out == payload, "a wrong byte"
        num_loaded += 1
stats = tier.stats()
print(num_loaded, stats.stored, stats.damaged, flush=True)
"""


def start(folder: Path, seed: int, num_operations: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(folder), str(seed), str(num_operations)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def check_all(folder: Path, blocks: Any) -> int:
    """Load every block; how many there are. What is there must be right."""
    tier = FileTier(Folder(str(folder)), None)
    out = bytearray(SIZE)
    found = 0
    for number in range(NUM_BLOCKS):
        key = blocks.key(number)
        if tier.load(blocks.space, key, memoryview(out)):
            assert out == blocks.payload(key, SIZE)
            found += 1
    assert tier.stats().damaged == 0
    return found


def test_processes_share_a_folder(tmp_path: Path, blocks: Any):
    processes = [start(tmp_path, seed, 400) for seed in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    for output in outputs:
        num_loaded, num_stored, num_damaged = map(int, output.split())
        assert num_loaded > 20
        assert num_stored > 5
        assert num_damaged == 0
    assert check_all(tmp_path, blocks) > 15
    assert not list(tmp_path.rglob(".tmp*"))


def test_killed_writers_leave_no_wrong_byte_and_no_rest(tmp_path: Path, blocks: Any):
    choose = random.Random(5)
    for seed in range(40 if os.environ.get("LLMKIT_DEEP_TESTS") else 4):
        process = start(tmp_path, seed, 1_000_000)
        time.sleep(choose.random() * 0.15)  # anywhere in its work
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        check_all(tmp_path, blocks)
    tier = FileTier(Folder(str(tmp_path)), LIMIT)
    key = blocks.key(NUM_BLOCKS)
    tier.store(blocks.space, key, memoryview(blocks.payload(key, SIZE)))
    assert tier.stats().num_bytes <= LIMIT
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) == tier.stats().num_bytes
