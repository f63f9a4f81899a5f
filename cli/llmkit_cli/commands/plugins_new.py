"""`llmkit plugins new`: write a plugin package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from llmkit.errors import ConfigError


def new(
    plugins: Annotated[
        list[str],
        typer.Argument(metavar="KIND NAME | KIND:NAME…", help="For example scheduler my-policy; several as KIND:NAME."),
    ],
    folder: Annotated[Path, typer.Option("--dir", help="Where to put the package's folder.")] = Path(),
    package: Annotated[
        str | None, typer.Option("--package", help="Name of the package; by default llmkit-NAME.")
    ] = None,
) -> None:
    """Write a package with a working plugin, its options, tests and conformance run. Nothing is ever overwritten."""
    from llmkit_cli.scaffold.naming import package_names
    from llmkit_cli.scaffold.package import kinds_with_template, write_package

    names = package_names(pairs_of(plugins), package, kinds_with_template())
    files = write_package(names, folder)
    place = folder / names.distribution
    typer.secho(f"{place}", bold=True)
    for file in files:
        typer.echo(f"  {file}")
    typer.echo(f"\nNext:\n  pip install -e '{place}[dev]'\n  cd {place} && pytest")


def pairs_of(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """(kind, name) of each plugin. Raises ConfigError if that is not what the arguments say."""
    if len(arguments) == 2 and not any(":" in argument for argument in arguments):
        return [(arguments[0], arguments[1])]
    pairs = [argument.partition(":") for argument in arguments]
    if not all(colon for _, colon, _ in pairs):
        raise ConfigError(
            f"{' '.join(arguments)!r} is neither KIND NAME nor a list of KIND:NAME.",
            hint="For example: llmkit plugins new scheduler my-policy.",
        )
    return [(kind, name) for kind, _, name in pairs]
