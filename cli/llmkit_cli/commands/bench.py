"""`llmkit bench`: throughput, latency, start-up and load on a server, as a table or as JSON."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from llmkit.errors import ConfigError
from llmkit_cli.bench.shapes import SHAPES, write_shape
from llmkit_cli.bench.workloads import names
from llmkit_cli.commands.bench_serve import serve
from llmkit_cli.engine_options import ENGINE_OPTIONS, loaded_config, open_llm, print_dry_run
from llmkit_cli.signature import LongHelp, OptionGroup, with_options

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Measure throughput, latency and start-up, greedy, with fixed lengths and a cold prefix cache; and servers.",
)
app.command()(serve)

BENCH_OPTIONS = OptionGroup(
    "bench",
    {
        "shape": (
            Annotated[
                str | None,
                typer.Option(help=f"Dummy weights of a real shape instead of a model: {', '.join(SHAPES)}."),
            ],
            None,
        ),
        "runs": (Annotated[int, typer.Option(min=1, help="Counted runs; one more comes first to warm up.")], 3),
        "as_json": (Annotated[bool, typer.Option("--json", help="Print JSON.")], False),
        "output": (Annotated[Path | None, typer.Option(help="Write the result as JSON to this file.")], None),
    },
)

WORKLOAD_HELP = f"One of {', '.join(names())}."


@contextmanager
def engine_flags(engine: dict[str, Any], bench: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Extra settings for a shape: a folder with its config.json, dummy weights, no tokenizer."""
    if bench["shape"] is None:
        yield {}
        return
    if bench["shape"] not in SHAPES:
        raise ConfigError(f"There is no shape {bench['shape']!r}.", hint=f"The shapes are {', '.join(SHAPES)}.")
    if engine["model__model"] is not None:
        raise ConfigError("--shape and --model exclude each other.")
    with tempfile.TemporaryDirectory(prefix="llmkit-shape-") as folder:
        yield {
            "model.model": str(write_shape(bench["shape"], Path(folder))),
            "model.load_format": "dummy",
            "model.skip_tokenizer": True,
        }


def report(result: dict[str, Any], bench: dict[str, Any]) -> None:
    """Print the result, and write it where it was asked for."""
    text = json.dumps(result, indent=2)
    if bench["output"] is not None:
        bench["output"].write_text(text + "\n", encoding="utf-8")
    if bench["as_json"]:
        typer.echo(text)
        return
    for section, values in result.items():
        if not isinstance(values, dict):
            typer.echo(f"{section}: {values}")
            continue
        typer.secho(section, bold=True)
        for key, value in values.items():
            if isinstance(value, dict):
                typer.echo(f"  {key:<26} {value['median']:>10} [{value['min']} – {value['max']}]")
            else:
                typer.echo(f"  {key:<26} {value}")


@app.command(cls=LongHelp)
@with_options(BENCH_OPTIONS, ENGINE_OPTIONS)
def throughput(
    workload: Annotated[str, typer.Option(help=WORKLOAD_HELP)] = "mixed-32",
    *,
    bench: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """All requests of a workload at once: tokens and requests per second."""
    from llmkit_cli.bench.measure import measure_throughput

    run_on_engine("throughput", workload, measure_throughput, bench, engine)


@app.command(cls=LongHelp)
@with_options(BENCH_OPTIONS, ENGINE_OPTIONS)
def latency(
    workload: Annotated[str, typer.Option(help=WORKLOAD_HELP)] = "decode-128",
    *,
    bench: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """One request after the other: time to the first token, time per further token."""
    from llmkit_cli.bench.measure import measure_latency

    run_on_engine("latency", workload, measure_latency, bench, engine)


def run_on_engine(what: str, workload: str, measure: Any, bench: dict[str, Any], engine: dict[str, Any]) -> None:
    """Warm up, measure, and put the figures beside what the machine could do at best."""
    from llmkit_cli.bench.ceilings import against_ceilings, measure_ceilings
    from llmkit_cli.bench.measure import repeat, vocabulary_of
    from llmkit_cli.bench.workloads import workload as items_of

    with engine_flags(engine, bench) as more:
        if engine["dry_run"]:
            print_dry_run(engine, **more)
            return
        with open_llm(engine, **more) as llm:
            items = items_of(workload, vocabulary_of(llm))
            measure(llm, items[:1])
            figures = repeat(bench["runs"], lambda: measure(llm, items))
            ceilings = measure_ceilings(llm.config.execution.device, llm.config.model.dtype)
            limits = against_ceilings(ceilings, llm, figures)
            times = {f"{t.kind}:{t.name}": t.describe() for t in llm.plugin_timings()}
            plugins = {s.kind: f"{s.name} ({s.reason})" for s in llm.engine.prepared.registry.selections}
    result = {"benchmark": what, "model": bench["shape"] or str(engine["model__model"]), "workload": workload}
    report({**result, "figures": figures, "limits": limits, "plugins": plugins, "plugin_times": times}, bench)


@app.command(cls=LongHelp)
@with_options(BENCH_OPTIONS, ENGINE_OPTIONS)
def startup(*, bench: dict[str, Any], engine: dict[str, Any]) -> None:
    """A new process to its first token: seconds, and peak resident memory."""
    from llmkit_cli.bench.measure import measure_startup, repeat

    with engine_flags(engine, bench) as more:
        if engine["dry_run"]:
            print_dry_run(engine, **more)
            return
        settings = loaded_config(engine, **more).config.model_dump(mode="json", exclude_defaults=True)
        measure_startup(settings)
        figures = repeat(bench["runs"], lambda: measure_startup(settings))
    model = bench["shape"] or str(engine["model__model"])
    report({"benchmark": "startup", "model": model, "figures": figures}, bench)
