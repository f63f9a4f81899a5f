"""llama.cpp's server as a driver, over its HTTP API on loopback: python driver_llamacpp.py SERVER GGUF
[ARGUMENT OF THE SERVER ...] [--start-only].

Streams run in a server with one slot, batches in one with 32 slots and separate caches. The shared-prefix workload
runs one request after another in one slot, which is faster there because slots do not share a prefix. Each server is
started anew for its workload.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import protocol

PORT = 18431
ONE_SLOT = ["-np", "1", "-c", "2048"]
MANY_SLOTS = ["-np", "32", "-no-kvu", "-c", "40960"]


def post(body: dict[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=600)
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    return response


def healthy() -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


@contextmanager
def server(extra: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    binary, gguf, *more = (argument for argument in sys.argv[1:] if argument != "--start-only")
    command = [
        binary,
        "-m",
        gguf,
        "--host",
        "127.0.0.1",
        "--port",
        str(PORT),
        "-t",
        "2",
        "-tb",
        "2",
        "--no-warmup",
        *more,
        *extra,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not healthy():
            assert process.poll() is None, "llama-server ended at once"
            time.sleep(0.01)
        yield process
    finally:
        process.terminate()
        process.wait()


def body(prompt: list[int], count: int, **more: Any) -> dict[str, Any]:
    greedy = {"temperature": 0, "top_k": 1, "samplers": ["top_k"], "ignore_eos": True}
    return {"prompt": prompt, "n_predict": count, "cache_prompt": False, **greedy, **more}


def stream(prompt: list[int], count: int) -> list[float]:
    times = [time.perf_counter()]
    events = post(body(prompt, count, stream=True))
    times.extend(time.perf_counter() for line in events if line.startswith(b"data: "))
    return times[: count + 1]


def batch(requests: list[protocol.Request], *, at_once: int, cache: bool) -> list[int]:
    counts, pending, lock = [0] * len(requests), iter(range(len(requests))), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                index = next(pending, None)
            if index is None:
                return
            request = requests[index]
            answer = json.load(post(body(request["prompt"], request["max_tokens"], cache_prompt=cache)))
            counts[index] = answer["tokens_predicted"]

    threads = [threading.Thread(target=work) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts


def run(name: str) -> dict[str, float]:
    requests, warm = protocol.requests_of(name), protocol.requests_of("start-32")[0]
    with server(MANY_SLOTS if name == "mixed-32" else ONE_SLOT) as process:
        stream(warm["prompt"], 1)
        if name in protocol.STREAMED:
            figures = protocol.figures_of_stream(requests[0], stream(requests[0]["prompt"], requests[0]["max_tokens"]))
        else:
            start = time.perf_counter()
            counts = batch(requests, at_once=32 if name == "mixed-32" else 1, cache=name == "prefix-768")
            figures = protocol.figures_of_batch(requests, counts, time.perf_counter() - start)
        return {**figures, "peak_resident_mib": protocol.peak_resident_mib(process.pid)}


def main() -> None:
    if "--start-only" in sys.argv:
        with server(ONE_SLOT) as process:
            stream(protocol.requests_of("start-32")[0]["prompt"], 1)
            print(
                json.dumps({"first_token": True, "peak_resident_mib": protocol.peak_resident_mib(process.pid)}),
                flush=True,
            )
        return
    print(json.dumps({"ready": "llama.cpp (llama-server)"}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line)["workload"])), flush=True)


if __name__ == "__main__":
    main()
