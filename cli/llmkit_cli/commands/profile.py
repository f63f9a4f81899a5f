"""`llmkit profile`: a trace of a workload, and a table of the time per step by part."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmkit.errors import EngineError
from llmkit_cli.commands.bench import BENCH_OPTIONS, WORKLOAD_HELP, engine_flags
from llmkit_cli.engine_options import ENGINE_OPTIONS, open_llm, print_dry_run
from llmkit_cli.signature import LongHelp, OptionGroup, with_options

if TYPE_CHECKING:
    from llmkit_cli.bench.trace import Share, TraceSummary

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help="Record where the time of steps goes.")

OPTIONS = OptionGroup(
    "profile",
    {name: BENCH_OPTIONS.options[name] for name in ("shape", "as_json")}
    | {
        "folder": (
            Annotated[Path, typer.Option(help="Folder for the trace, which chrome://tracing and Perfetto open.")],
            Path("llmkit-profiles"),
        ),
        "top": (Annotated[int, typer.Option(min=0, help="Operations and kernels that are listed.")], 12),
        "max_tokens": (
            Annotated[int | None, typer.Option(min=1, help="Shorten the answers; traces grow with them.")],
            32,
        ),
    },
)


@app.command(cls=LongHelp)
@with_options(OPTIONS, ENGINE_OPTIONS)
def profile(
    workload: Annotated[str, typer.Option(help=WORKLOAD_HELP)] = "decode-128",
    *,
    profile: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Run a workload twice, the second time with a recording: all its requests at once, greedy, prefix cache cold."""
    with engine_flags(engine, profile) as more:
        if engine["dry_run"]:
            print_dry_run(engine, **more)
            return
        path, summary = recorded(workload, profile, engine, more)
    if profile["as_json"]:
        typer.echo(json.dumps(as_dict(path, summary), indent=2))
        return
    typer.echo(f"trace: {path}")
    for line in table(summary, profile["top"]):
        typer.echo(line)


def recorded(
    workload: str, options: dict[str, Any], engine: dict[str, Any], more: dict[str, Any]
) -> tuple[Path, TraceSummary]:
    """The trace of one run of the workload, and what it adds up to."""
    from llmkit.engine.utilities import start_profile, stop_profile
    from llmkit_cli.bench.measure import measure_throughput, vocabulary_of
    from llmkit_cli.bench.trace import read_trace, summarised
    from llmkit_cli.bench.workloads import workload as items_of

    with open_llm(engine, **more) as llm:
        most = options["max_tokens"]
        items = [
            item if most is None else replace(item, max_tokens=min(item.max_tokens, most))
            for item in items_of(workload, vocabulary_of(llm))
        ]
        measure_throughput(llm, items)
        start_profile(llm.engine, str(options["folder"].absolute()))
        try:
            measure_throughput(llm, items)
        finally:
            path = Path(stop_profile(llm.engine))
    summary = summarised(read_trace(path))
    if not summary.steps:
        raise EngineError(f"the trace {path} shows no step.")
    return path, summary


def as_dict(path: Path, summary: TraceSummary) -> dict[str, Any]:
    """For JSON: times in milliseconds over the whole recording."""
    shares = {
        what: {name: vars(share) for name, share in getattr(summary, what).items()}
        for what in ("parts", "operations", "kernels")
    }
    return {
        "trace": str(path),
        "steps": summary.steps,
        "wall_ms": summary.wall_ms,
        "device_ms": summary.device_ms,
        "device_busy_ms": summary.device_busy_ms,
        **shares,
    }


def table(summary: TraceSummary, top: int) -> list[str]:
    """Parts of the host, then torch's operations there, then what the device did."""
    steps, wall = summary.steps, summary.wall_ms
    lines = [f"{steps} steps, {wall / steps:.3f} ms each", "", _row("part", "calls", "ms a step", "share")]
    lines += [_line(name, share, steps, wall) for name, share in _ordered(summary.parts)]
    rest = wall - sum(share.ms for share in summary.parts.values())
    lines.append(_row("between parts", "", f"{rest / steps:.3f}", f"{rest / wall:.1%}"))
    if summary.device_ms:
        busy, span = summary.device_busy_ms, summary.device_ms
        lines += ["", f"device: {busy / steps:.3f} ms a step, idle {1 - busy / span:.1%} of the time"]
    for title, shares, whole in (
        ("kernel", summary.kernels, summary.device_busy_ms),
        ("operation on the host", summary.operations, wall),
    ):
        if shares and top and whole:
            lines += ["", _row(title, "calls", "ms a step", "share")]
            lines += [_line(name, share, steps, whole) for name, share in _ordered(shares)[:top]]
    return lines


def _ordered(shares: dict[str, Share]) -> list[tuple[str, Share]]:
    return sorted(shares.items(), key=lambda item: -item[1].ms)


def _line(name: str, share: Share, steps: int, whole: float) -> str:
    return _row(name, str(share.calls), f"{share.ms / steps:.3f}", f"{share.ms / whole:.1%}")


def _row(name: str, *columns: str) -> str:
    shown = name if len(name) <= 56 else name[:53] + "..."
    return f"{shown:<56}" + "".join(f" {column:>10}" for column in columns)
