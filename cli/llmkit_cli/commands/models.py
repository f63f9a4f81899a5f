"""`llmkit models`: fetch and list models."""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True, help="Fetch and list models."
)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="A name from `llmkit models list`.")],
) -> None:
    """Fetch a model into the llmkit cache; does nothing if it is there."""
    from llmkit.frontend import model_store

    if (there := model_store.installed().get(name)) is not None:
        typer.echo(str(there))
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task(name, total=None)

    def show(done: int, total: int) -> None:
        bar.start()  # with the first bytes: a name that is refused shows no bar
        bar.update(task, completed=done, total=total)

    try:
        path = model_store.pull(name, show)
    finally:
        if bar.live.is_started:
            bar.stop()
    typer.echo(str(path))


@app.command("list")
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models that can be fetched by name, and which of them are here."""
    from llmkit.frontend import model_store

    here = model_store.installed()
    rows = [
        {"name": name, "summary": entry.summary, "path": str(here[name]) if name in here else None}
        for name, entry in model_store.CATALOGUE.items()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        state = row["path"] or f"not fetched: llmkit models pull {row['name']}"
        typer.echo(f"{row['name']}\n    {row['summary']}\n    {state}")
