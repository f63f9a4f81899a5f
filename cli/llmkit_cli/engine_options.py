"""The flags of every command that builds an engine, made from the configuration's own table, and what they build."""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmkit.config.flags import Flag, all_flags, combined_flags
from llmkit.config.load import LoadedConfig, load_config
from llmkit.logs import START_LOGGER
from llmkit_cli.signature import OptionGroup

if TYPE_CHECKING:
    from llmkit import LLM

PANEL = "Engine: {}"
LONGEST_METAVAR = 16
METAVARS = {"text": "TEXT", "integer": "N", "number": "X", "list": "LIST", "table": "JSON", "boolean": "BOOL"}

_MODULE_PATH = re.compile(r"[A-Za-z_][\w.]*:[\w.]*")
_FLAGS = (*all_flags(), *combined_flags())


def parameter_name(flag: Flag) -> str:
    return flag.key.replace(".", "__")


def _option(flag: Flag) -> tuple[Any, Any]:
    section, dot, _ = flag.key.partition(".")
    panel = "Server" if section == "server" else PANEL.format(section if dot else "all")
    default = "" if flag.default in (None, "", (), {}) else f" (default: {flag.default})"
    text = f"{flag.description}{default}"
    if flag.type == "boolean" and not flag.choices:
        return Annotated[
            bool | None,
            typer.Option(f"{flag.name}/{flag.negative}", help=text, rich_help_panel=panel, show_default=False),
        ], None
    metavar = METAVARS[flag.type]
    if flag.choices and flag.type != "boolean":
        metavar = "|".join(flag.choices)
        if len(metavar) > LONGEST_METAVAR:
            # A wide column of types would leave too little for the names of the flags.
            metavar, text = "NAME", f"{text} One of {', '.join(flag.choices)}."
    return Annotated[str | None, typer.Option(flag.name, metavar=metavar, help=text, rich_help_panel=panel)], None


def _engine_options(server: Callable[[str], bool]) -> dict[str, tuple[Any, Any]]:
    """server: which settings of the server are among them, by key."""
    options: dict[str, tuple[Any, Any]] = {
        "config": (
            Annotated[
                Path | None,
                typer.Option(
                    "--config", help="Settings from a TOML or YAML file.", rich_help_panel=PANEL.format("all")
                ),
            ],
            None,
        ),
        "settings": (
            Annotated[
                list[str] | None,
                typer.Option(
                    "--set",
                    metavar="KEY=VALUE",
                    help="Any setting by its key, or KIND.NAME.OPTION=VALUE for a plugin's; may be repeated.",
                    rich_help_panel=PANEL.format("all"),
                ),
            ],
            None,
        ),
        "dry_run": (
            Annotated[
                bool,
                typer.Option(
                    "--dry-run",
                    help="Say which plugins would be used and why, and what takes how much memory; load nothing.",
                    rich_help_panel=PANEL.format("all"),
                ),
            ],
            False,
        ),
    }
    flags = [flag for flag in _FLAGS if flag.name and (not flag.key.startswith("server.") or server(flag.key))]
    return options | {parameter_name(flag): _option(flag) for flag in flags}


ENGINE_OPTIONS = OptionGroup("engine", _engine_options(lambda _: False))
ALL_OPTIONS = OptionGroup("engine", _engine_options(lambda _: True))
"""With the settings of the server."""

_BATCH_KEYS = ("server.served_model_names", "server.tool_parser", "server.reasoning_parser")

BATCH_OPTIONS = OptionGroup("engine", _engine_options(_BATCH_KEYS.__contains__))
"""With those settings of the server that matter to requests from a file."""


def given_flags(engine: dict[str, Any]) -> dict[str, Any]:
    """Dotted key → value of the flags that were given on the command line."""
    return {
        flag.key: engine[parameter_name(flag)]
        for flag in _FLAGS
        if flag.name and engine.get(parameter_name(flag)) is not None
    }


def loaded_config(engine: dict[str, Any], **more: Any) -> LoadedConfig:
    """The configuration from the flags (`more` on top), the environment, the file and the defaults."""
    loaded = load_config(
        flags={**given_flags(engine), **more}, settings=engine["settings"] or (), file=engine["config"]
    )
    find_local_modules(loaded.config.model_dump(mode="json"))
    return loaded


def find_local_modules(value: Any) -> None:
    """Let `module:attribute` in the settings `value` name a module of the current folder, as `python -m` would.

    The folder comes last in `sys.path`, and only if a setting needs it: what is installed is not hidden by what happens
    to lie there.
    """
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            find_local_modules(item)
        return
    if not isinstance(value, str) or not _MODULE_PATH.fullmatch(value):
        return
    name, here = value.partition(":")[0].partition(".")[0], Path.cwd()
    is_here = (here / f"{name}.py").is_file() or (here / name).is_dir()
    if is_here and str(here) not in sys.path and importlib.util.find_spec(name) is None:
        sys.path.append(str(here))


@contextmanager
def open_llm(engine: dict[str, Any], **more: Any) -> Iterator[LLM]:
    """An engine for the flags; closed afterwards."""
    from llmkit import LLM

    config = loaded_config(engine, **more).config
    with loading_bar() as progress, start_lines(config.observability.log_level):
        llm = LLM(config=config, progress=progress)
    with llm:
        yield llm


@contextmanager
def start_lines(log_level: str) -> Iterator[None]:
    """Lines on stderr that tell why a start takes its time, unless `log_level` is "error"."""
    logger = logging.getLogger(START_LOGGER)
    handler = logging.StreamHandler(sys.stderr)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR if log_level == "error" else logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def loading_bar() -> Iterator[Callable[[int, int | None], None] | None]:
    """A bar on stderr for the loading of weights, if a person is watching: called with (bytes done, bytes in all)."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.filesize import decimal
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[size]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        # Imports and reading the configuration come first: there are no bytes to count yet.
        task = bar.add_task("Loading the model", total=None, size="")

        def show(done: int, total: int | None) -> None:
            size = decimal(done) if total is None else f"{decimal(done)} of {decimal(total)}"
            bar.update(task, completed=done, total=total, size=size)

        yield show


def print_dry_run(engine: dict[str, Any], *, online: bool = False, **more: Any) -> None:
    """Print the plugins chosen with reasons, and the memory plan. online: of a server."""
    from llmkit.engine.factory import plan_engine

    plan = plan_engine(loaded_config(engine, **more).config, online=online)
    typer.secho("model", bold=True)
    typer.echo(f"  {plan.source.path} ({plan.source.format_name}, {plan.source.architecture})")
    typer.secho("plugins", bold=True)
    for selection in plan.registry.selections:
        typer.echo(f"  {selection.kind:<12} {selection.name}: {selection.reason}")
        for name, reason in selection.rejected.items():
            typer.echo(f"  {'':<12} not {name}: {reason}")
    typer.secho("memory", bold=True)
    typer.echo(f"  {plan.report.memory.describe()}")
    tokens = (plan.layout.num_blocks - 1) * plan.layout.block_size
    typer.echo(f"  The cache holds {tokens} tokens in blocks of {plan.layout.block_size}.")
    if plan.layout.num_host_blocks:
        size = plan.layout.num_host_blocks * plan.report.memory.block_bytes / 2**30
        typer.echo(f"  Preempted requests are swapped out to {size:.2f} GiB of host memory.")
