"""`llmkit bench serve` without its flags: from what is asked for to results."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from llmkit.errors import LlmkitError
from llmkit_cli.load.arrivals import arrival_times
from llmkit_cli.load.dataset import PATHS, Endpoint, LoadItem, RandomLengths, body_of, items_of
from llmkit_cli.load.figures import details, figures
from llmkit_cli.load.record import RequestRecord, timed_request
from llmkit_cli.load.run import LoadRun, run_load
from llmkit_cli.remote.server import RemoteServer


@dataclass(frozen=True)
class LoadPlan:
    """What is to be sent, and where. rates: requests a second, one run for each. fields: of every request's body."""

    url: str
    api_key: str | None
    model: str | None
    endpoint: Endpoint
    dataset: str
    num_prompts: int | None
    lengths: RandomLengths
    rates: tuple[float, ...]
    burstiness: float
    max_concurrency: int | None
    num_warmups: int
    seed: int
    timeout_s: float
    fields: Mapping[str, Any]
    percentiles: tuple[float, ...]
    goals: Mapping[str, float]
    with_details: bool

    def items(self, run: int) -> list[LoadItem]:
        """Of one run: random prompts are new ones in each, so that the server's prefix cache does not know them."""
        return items_of(self.dataset, self.endpoint, self.num_prompts, self.lengths, f"{self.seed}.{run}")

    def bodies(self, model: str, run: int) -> list[bytes]:
        return [msgspec.json.encode(body_of(item, self.endpoint, model, self.fields)) for item in self.items(run)]


async def bench(plan: LoadPlan, report: Callable[[dict[str, Any]], None]) -> None:
    """Warm up, then a run for each rate; `report` is called with each result. Raises ConfigError, RemoteError; a
    warm-up request that fails is an error, later ones are counted."""
    plan.items(0)  # what is wrong with the dataset is said before anything is sent
    async with RemoteServer(plan.url, plan.api_key, timeout_s=plan.timeout_s) as server:
        model = await server.served_model(plan.model)
        path = PATHS[plan.endpoint]
        await _warm_up(plan, server, path, model)
        for number, rate in enumerate(plan.rates):
            bodies = plan.bodies(model, number)
            arrivals = arrival_times(len(bodies), rate, plan.burstiness, plan.seed)
            with progress(len(bodies), rate) as done:
                run = await run_load(server, path, bodies, arrivals, plan.max_concurrency, done)
            report(_result(plan, server, model, rate, run))


async def _warm_up(plan: LoadPlan, server: RemoteServer, path: str, model: str) -> None:
    bodies = plan.bodies(model, -1)
    for i in range(plan.num_warmups):
        record = await timed_request(server, path, bodies[i % len(bodies)])
        if record.error is not None:
            raise LlmkitError(f"The first request has failed, so nothing was measured. {record.error}")


def _result(plan: LoadPlan, server: RemoteServer, model: str, rate: float, run: LoadRun) -> dict[str, Any]:
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "url": server.url,
        "model": model,
        "endpoint": plan.endpoint,
        "dataset": plan.dataset,
        "num_prompts": len(run.records),
        "request_rate": "inf" if math.isinf(rate) else rate,  # JSON has no infinity
        "burstiness": plan.burstiness,
        "max_concurrency": plan.max_concurrency,
        "seed": plan.seed,
    }
    return about | figures(run, plan.percentiles, plan.goals) | (details(run) if plan.with_details else {})


@contextlib.contextmanager
def progress(total: int, rate: float) -> Iterator[Callable[[RequestRecord], None] | None]:
    """A bar on stderr if a person is watching: called with each request that has ended."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    name = "all at once" if math.isinf(rate) else f"{rate:g} requests/s"
    failed = 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=total)

        def done(record: RequestRecord) -> None:
            nonlocal failed
            failed += record.error_kind is not None
            bar.update(task, advance=1, description=f"{name}, {failed} failed" if failed else name)

        yield done
