"""What the light commands cost: seconds of a whole process, least and median of several runs, as JSON."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "python (nothing)": ["-c", "pass"],
    "import llmkit": ["-c", "import llmkit"],
    "llmkit --help": ["-m", "llmkit_cli", "--help"],
    "llmkit plugins list": ["-m", "llmkit_cli", "plugins", "list"],
}


def measure(arguments: list[str], runs: int = 7) -> dict[str, float]:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return {"min_s": round(min(times), 3), "median_s": round(statistics.median(times), 3)}


if __name__ == "__main__":
    print(json.dumps({name: measure(arguments) for name, arguments in COMMANDS.items()}, indent=1))
