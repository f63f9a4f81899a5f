"""Option groups: the same set of flags on several commands, declared once.

Typer reads a command's flags from its signature; `with_options` extends the signature by the flags of the groups, and
hands their values to the command as one dictionary per group.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand


@dataclass(frozen=True)
class OptionGroup:
    """A named set of options: parameter name → (Annotated type, default)."""

    name: str
    options: dict[str, tuple[Any, Any]]


class LongHelp(TyperCommand):
    """A command with many flags: its help gives `--no-…` no column of its own.

    That column would be as wide as the longest of them, and in a terminal of 80 columns the names of the flags
    themselves would be cut.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for parameter in self.params:
            negatives = ", ".join(parameter.secondary_opts)
            if negatives:
                text: str = getattr(parameter, "help", None) or ""
                parameter.help = f"{text} {negatives}: off.".strip()  # type: ignore[attr-defined]
                parameter.secondary_opts = []
        super().format_help(ctx, formatter)


def with_options(*groups: OptionGroup) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command that takes one keyword argument per group, named as the group: a dict of its values."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        taken = {group.name for group in groups}
        kept = [parameter for name, parameter in own.parameters.items() if name not in taken]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
            for group in groups
            for name, (annotation, default) in group.options.items()
        ]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            grouped = {group.name: {name: values.pop(name) for name in group.options} for group in groups}
            command(**values, **grouped)

        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in kept] + added
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        del run.__wrapped__  # type: ignore[attr-defined]
        return run

    return decorate
