"""`llmkit plugins`: what is installed, what one plugin is, and whether each can be used here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmkit.errors import ConfigError
from llmkit.hookspecs.kinds import KINDS, kind_named
from llmkit_cli.commands.plugins_new import new

if TYPE_CHECKING:
    from llmkit.config import EngineConfig
    from llmkit.registry import Registry

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="List, inspect, check and begin plugins.",
)
app.command("new")(new)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SafeModeOption = Annotated[bool, typer.Option("--safe-mode", help="Ignore every third-party distribution.")]


def discover(safe_mode: bool) -> Registry:
    from llmkit.config import load_config
    from llmkit.registry import Registry

    flags = {"plugins.safe_mode": True} if safe_mode else {}
    return Registry.discover(load_config(flags=flags).config.plugins)


@app.command("list")
def list_plugins(
    kind: Annotated[str | None, typer.Argument(help="Only this kind.")] = None,
    as_json: JsonOption = False,
    safe_mode: SafeModeOption = False,
) -> None:
    """List every plugin that is installed, from metadata alone: nothing is imported."""
    if kind is not None:
        check_kind(kind)
    registry = discover(safe_mode)
    rows = registry.find(kind)
    if as_json:
        fields = ("kind", "name", "distribution", "version", "value", "state", "reason")
        typer.echo(json.dumps([{field: getattr(row, field) for field in fields} for row in rows], indent=2))
        return
    for shown in KINDS:
        here = [row for row in rows if row.kind == shown.name]
        if not here and kind != shown.name:
            continue
        flag = f" ({shown.flag})" if shown.flag else ""
        typer.secho(f"{shown.name}{flag}: {shown.summary}", bold=True)
        for row in here:
            state = "" if row.state == "found" else f"  {row.state}: {row.reason}"
            typer.echo(f"  {row.name:<24} {row.origin}{state}")
    for warning in registry.warnings:
        typer.secho(warning, fg=typer.colors.YELLOW, err=True)


def check_kind(kind: str) -> None:
    try:
        kind_named(kind)
    except KeyError as error:
        raise ConfigError(f"{error.args[0]}.") from error


@app.command()
def inspect(
    plugin: Annotated[str, typer.Argument(metavar="KIND:NAME", help="For example scheduler:priority.")],
    as_json: JsonOption = False,
    safe_mode: SafeModeOption = False,
) -> None:
    """Show one plugin: where it comes from, what it needs, its options with defaults. Imports it."""
    kind, colon, name = plugin.partition(":")
    if not colon or not name:
        raise ConfigError(f"{plugin!r} is not of the form KIND:NAME.", hint="For example scheduler:priority.")
    check_kind(kind)
    facts = facts_of(discover(safe_mode), kind, name)
    if as_json:
        typer.echo(json.dumps(facts, indent=2, default=str))
        return
    for key, value in facts.items():
        if key != "options":
            typer.echo(f"{key:<14} {', '.join(value) if isinstance(value, list) else value}")
    typer.echo("options" if facts["options"] else "options        none")
    for option in facts["options"]:
        default = "required" if option["required"] else f"default {option['default']!r}"
        typer.echo(f"  {option['name']} ({option['type']}, {default}): {option['description']}")


def facts_of(registry: Registry, kind: str, name: str) -> dict[str, Any]:
    """Everything there is to say of a plugin; JSON-encodable. Raises PluginError if it cannot be loaded."""
    from llmkit.registry import detect_environment

    loaded = registry.load(kind, name)
    row, info = loaded.row, loaded.info
    timing = registry.timings.of(row)
    return {
        "kind": row.kind,
        "name": row.name,
        "summary": info.summary,
        "distribution": row.distribution,
        "version": row.version,
        "front door": row.value,
        "rank": info.rank,
        "in auto": info.auto and registry.in_auto(row),
        "requires": list(info.requires),
        "problems here": loaded.problems(detect_environment()),
        "import seconds": None if timing.import_seconds is None else round(timing.import_seconds, 4),
        "options": options_of(info.options),
    }


def options_of(model: Any) -> list[dict[str, Any]]:
    """Name, type, default and description of each field of an options model."""
    if model is None:
        return []
    return [
        {
            "name": name,
            "type": getattr(field.annotation, "__name__", str(field.annotation)),
            "required": field.is_required(),
            "default": None if field.is_required() else field.get_default(call_default_factory=True, validated_data={}),
            "description": field.description or "",
        }
        for name, field in model.model_fields.items()
    ]


def choices_of(config: EngineConfig) -> dict[str, Any]:
    """Kind → what the configuration chooses of it, as far as that does not depend on a model."""
    choices = {}
    for kind in KINDS:
        value: Any = config
        for part in kind.config_key.split(".") if kind.config_key else ():
            value = getattr(value, part)
        if kind.auto_by_model and value == "auto":
            continue
        choices[kind.name] = value if kind.config_key else None
    return choices


@app.command()
def doctor(
    device: Annotated[
        str, typer.Option(help='Judge for this device type: "cpu" or "cuda"; auto: what is here.')
    ] = "auto",
    config_file: Annotated[
        Path | None, typer.Option("--config", help="A TOML or YAML file, to see what it selects.")
    ] = None,
    as_json: JsonOption = False,
    safe_mode: SafeModeOption = False,
    forget_faults: Annotated[
        bool, typer.Option("--forget-faults", help="Forget what is on record of faults at run time.")
    ] = False,
) -> None:
    """Load every plugin and say whether it is usable here, and if not, why and what to install."""
    from dataclasses import asdict

    from llmkit.config import load_config
    from llmkit.engine.device import resolve_device
    from llmkit.registry import Registry, detect_environment
    from llmkit.registry.fault_journal import FaultJournal

    if forget_faults:
        FaultJournal().clear()
    flags = {"plugins.safe_mode": True} if safe_mode else {}
    config = load_config(flags=flags, file=config_file).config
    registry = Registry.discover(config.plugins)
    # What would work on a GPU can be asked on a machine that has none; its compute capability is then unknown.
    environment = detect_environment(device if device == "cuda" else resolve_device(device))
    choices = choices_of(config)
    rows = registry.doctor(environment, choices)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    for row in rows:
        mark, colour = ("ok", typer.colors.GREEN) if row.usable else ("no", typer.colors.YELLOW)
        chosen = " (selected)" if row.selected else ""
        typer.secho(f"{mark}  ", fg=colour, nl=False)
        imported = "" if row.import_seconds is None else f"  [import {1e3 * row.import_seconds:.1f} ms]"
        typer.echo(f"{row.kind}:{row.name}{chosen}  {row.summary}{imported}")
        for reason in row.reasons:
            typer.echo(f"      {reason}")
        if row.hint and not row.usable:
            typer.echo(f"      {row.hint}")
        if row.faults:
            typer.secho(f"      {row.faults.describe()}", fg=typer.colors.YELLOW)
    undecided = [kind.name for kind in KINDS if kind.auto_by_model and kind.name not in choices]
    if undecided:
        typer.echo(f"What auto takes depends on the model for {', '.join(undecided)}: see serve MODEL --dry-run.")
