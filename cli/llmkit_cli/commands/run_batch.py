"""`llmkit run-batch`: the requests of a file, answered into another."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmkit.errors import ConfigError
from llmkit_cli.engine_options import BATCH_OPTIONS, loaded_config, loading_bar, print_dry_run
from llmkit_cli.signature import LongHelp, with_options

if TYPE_CHECKING:
    from llmkit import AsyncLLM
    from llmkit_cli.batch.journal import Journal
    from llmkit_cli.batch.run import BatchSummary

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(cls=LongHelp)
@with_options(BATCH_OPTIONS)
def run_batch(
    input_file: Annotated[Path, typer.Option("--input-file", "-i", help="Requests, a JSON object a line.")],
    output_file: Annotated[Path, typer.Option("--output-file", "-o", help="Results, in the order of the requests.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output file that is there.")] = False,
    *,
    engine: dict[str, Any],
) -> None:
    """Answer the requests of a batch file in OpenAI's format, with a model in this process.

    A line that cannot be answered gets an error of its own in the output. A run that breaks off goes on where it was
    when the same command is given again; the output file appears when all of it is there.
    """
    if engine["dry_run"]:
        print_dry_run(engine)
        return
    from llmkit import AsyncLLM
    from llmkit_cli.batch.journal import Journal
    from llmkit_cli.batch.run import input_lines

    if output_file.exists() and not overwrite:
        raise ConfigError(f"{output_file} exists.", hint="--overwrite replaces it.")
    num_lines = sum(1 for _ in input_lines(input_file))
    config = loaded_config(engine).config
    with Journal(output_file) as journal:
        with loading_bar() as progress:
            llm = AsyncLLM(config=config, progress=progress)
        try:
            summary = asyncio.run(answer_all(llm, journal, input_file, num_lines))
        except BaseException:
            typer.echo(f"What is done is kept in {journal.path}; the same command goes on from there.", err=True)
            raise
    taken_over = f", {summary.resumed} of an earlier run" if summary.resumed else ""
    typer.echo(f"{summary.completed} answered{taken_over}, {summary.failed} with errors: {output_file}", err=True)


async def answer_all(llm: AsyncLLM, journal: Journal, file: Path, num_lines: int) -> BatchSummary:
    """Run the batch and publish the output; the engine is closed in any case."""
    from llmkit_cli.batch.run import BatchRun
    from llmkit_server.in_process import InProcessServer

    async with llm:
        running = llm.config.scheduler.max_num_seqs
        assert running is not None
        with batch_bar(num_lines) as done:
            run = BatchRun(
                InProcessServer(llm),
                journal,
                concurrency=2 * running,  # as many wait as run, so that no step has to
                is_alive=lambda: llm.health.alive,
                done=done,
            )
            numbers = await run.run(file)
        journal.publish(numbers)
        return run.summary


@contextmanager
def batch_bar(total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr if a person is watching: called for each line."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("Requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Requests", total=total)
        yield lambda: bar.update(task, advance=1)
