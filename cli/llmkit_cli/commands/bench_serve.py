"""`llmkit bench serve`: load on a server with the API of OpenAI."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmkit.errors import ConfigError
from llmkit_cli.load.options import DATA_OPTIONS, LOAD_OPTIONS, RESULT_OPTIONS, TARGET_OPTIONS
from llmkit_cli.signature import with_options

if TYPE_CHECKING:
    from llmkit_cli.load.bench import LoadPlan

BUSY_CLIENT = 0.9
"""From here on the load generator may itself be what is slow."""


@with_options(TARGET_OPTIONS, DATA_OPTIONS, LOAD_OPTIONS, RESULT_OPTIONS)
def serve(
    goodput_more: Annotated[
        list[str] | None, typer.Argument(metavar="NAME:MS", help="Further goals behind --goodput.")
    ] = None,
    *,
    target: dict[str, Any],
    data: dict[str, Any],
    load: dict[str, Any],
    result: dict[str, Any],
) -> None:
    """Put load on a server with the API of OpenAI, llmkit's or another, and measure it from outside.

    Times begin when a request is sent. Exit code 1 if every request of a run has failed.
    """
    from llmkit_cli.load.bench import bench
    from llmkit_cli.load.plot import write_plot, writer_of

    is_sweep, plots = load["sweep"] is not None, result["plot"] or ()
    if plots and not is_sweep:
        raise ConfigError("--plot goes with --sweep.")
    if goodput_more and not result["goodput"]:
        raise ConfigError(f"Unexpected argument {goodput_more[0]!r}.")
    for file in plots:
        writer_of(file)
    plan = plan_of(target, data, load, result, goodput_more or [])
    results: list[dict[str, Any]] = []

    def report(one: dict[str, Any]) -> None:
        """A sweep that breaks off leaves what there is."""
        results.append(one)
        if result["output"] is not None:
            write_json(result["output"], {"sweep": results} if is_sweep else one)
        if not result["as_json"]:
            print_result(one)

    run_on_fast_loop(bench(plan, report))
    if result["as_json"]:
        typer.echo(json.dumps({"sweep": results} if is_sweep else results[0], indent=2))
    for file in plots:
        write_plot(file, f"{results[0]['model']}, {results[0]['dataset']}", results)
    if any(not one["completed"] for one in results):
        raise typer.Exit(1)


def plan_of(
    target: dict[str, Any], data: dict[str, Any], load: dict[str, Any], result: dict[str, Any], more_goals: list[str]
) -> LoadPlan:
    """What the flags ask for. Raises ConfigError."""
    from llmkit_cli.load.bench import LoadPlan
    from llmkit_cli.load.dataset import RandomLengths
    from llmkit_cli.load.figures import parse_goodput, parse_percentiles

    ignore_eos = data["ignore_eos"]
    if ignore_eos is None:
        ignore_eos = not data["dataset"].endswith(".jsonl")
    fields = {"temperature": data["temperature"], **({"ignore_eos": True} if ignore_eos else {})}
    return LoadPlan(
        url=target["url"],
        api_key=target["api_key"],
        model=target["model"],
        endpoint=target["endpoint"],
        dataset=data["dataset"],
        num_prompts=data["num_prompts"],
        lengths=RandomLengths(
            data["input_len"], data["output_len"], data["range_ratio"], data["prefix_len"], data["vocab_size"]
        ),
        rates=rates_of(load["request_rate"] if load["sweep"] is None else load["sweep"]),
        burstiness=load["burstiness"],
        max_concurrency=load["max_concurrency"],
        num_warmups=load["num_warmups"],
        seed=load["seed"],
        timeout_s=load["timeout"],
        fields={**fields, **json_object(data["extra_body"])},
        percentiles=tuple(parse_percentiles(result["percentiles"])),
        goals=parse_goodput([*(result["goodput"] or ()), *more_goals]),
        with_details=result["with_details"],
    )


def run_on_fast_loop(main: Any) -> None:
    """With uvloop, where there is one: it halves what a chunk costs the client."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = None  # type: ignore[assignment]
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main)


def rates_of(text: str) -> tuple[float, ...]:
    """`1,2.5,inf` → numbers. Raises ConfigError."""
    try:
        rates = tuple(float(word) for word in text.replace(",", " ").split())
    except ValueError:
        rates = ()
    if not rates or not all(rate > 0 for rate in rates):
        raise ConfigError(f"{text!r} is no rate: requests a second above 0, or inf.")
    return rates


def json_object(text: str | None) -> dict[str, Any]:
    """Raises ConfigError."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ConfigError("--extra-body must be a JSON object.")
    return value


def write_json(file: Path, value: Any) -> None:
    """Raises ConfigError."""
    try:
        file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The result cannot be written to {file}: {error}.") from error


def print_result(result: dict[str, Any]) -> None:
    """A table for people."""
    rate = result["request_rate"]
    where = f"{result['model']} at {result['url']}, {result['endpoint']}, {result['dataset']}"
    typer.secho(f"{where}, {'all at once' if rate == 'inf' else f'{rate:g} requests/s'}", bold=True)
    from llmkit_cli.load.figures import METRICS

    counts = f"{result['completed']} completed, {result['failed']} failed in {result['duration']:.2f} s"
    typer.echo(f"  {counts}; {result['total_input_tokens']} tokens in, {result['total_output_tokens']} out")
    for kind, error in result["errors"].items():
        typer.secho(f"  {error['count']} × {kind}: {error['first']}", fg=typer.colors.RED)
    names = ("request_throughput", "request_goodput", "output_throughput", "total_token_throughput")
    for name in (name for name in names if name in result):
        unit = "requests/s" if name.startswith("request") else "tokens/s"
        typer.echo(f"  {name.replace('_', ' '):<24} {result[name]:>10.2f} {unit}")
    columns = [key.removesuffix("_ttft_ms") for key in result if key.endswith("_ttft_ms")]
    typer.echo(f"  {'ms':<24}" + "".join(f" {column:>10}" for column in columns))
    for metric in METRICS:
        values = "".join(f" {result[f'{column}_{metric}_ms']:>10.2f}" for column in columns)
        typer.echo(f"  {metric:<24}{values}")
    if result["client_load"] > BUSY_CLIENT:
        typer.secho(
            f"  The load generator was busy {result['client_load']:.0%} of the time: the figures may be its own. "
            "Run several beside one another.",
            fg=typer.colors.YELLOW,
            err=True,
        )
