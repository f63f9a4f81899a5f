"""Which plugins may take part at all: the plugin settings, without the cost of importing pydantic."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmkit.errors import ConfigError
from llmkit.hookspecs.kinds import KINDS

if TYPE_CHECKING:
    from llmkit.config import PluginsConfig

DISABLE_VARIABLE = "LLMKIT_DISABLE_PLUGINS"

Options = Mapping[str, Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Disabled:
    """One entry of the list of plugins to leave out; `distribution` None means all of them."""

    kind: str
    name: str
    distribution: str | None
    source: str


@dataclass(frozen=True)
class PluginPolicy:
    """The values of PluginsConfig, with `disable` parsed and joined with LLMKIT_DISABLE_PLUGINS."""

    any_in_auto: bool = False
    safe_mode: bool = False
    strict: bool = False
    disabled: tuple[Disabled, ...] = ()
    options: Options = field(default_factory=dict)


def policy_from(plugins: PluginsConfig | None, environ: Mapping[str, str] | None = None) -> PluginPolicy:
    """The policy of a configuration (None: the defaults) and the environment.

    Raises ConfigError for an entry of the list that is not `kind:name`, or whose kind does not exist.
    """
    variable = (os.environ if environ is None else environ).get(DISABLE_VARIABLE, "")
    entries = dict.fromkeys(filter(None, map(str.strip, variable.split(","))), DISABLE_VARIABLE)
    if plugins is not None:
        # The configuration reads the variable too; an entry is reported under one name only.
        entries = dict.fromkeys(plugins.disable, "plugins.disable") | entries
    disabled = tuple(_parse(entry, source) for entry, source in entries.items())
    if plugins is None:
        return PluginPolicy(disabled=disabled)
    return PluginPolicy(plugins.auto == "any", plugins.safe_mode, plugins.strict, disabled, plugins.options)


def canonical(distribution: str) -> str:
    """A distribution's name as package indexes compare it: lower case, runs of `-_.` as one dash (PEP 503)."""
    return "-".join(filter(None, distribution.lower().replace("_", "-").replace(".", "-").split("-")))


def _parse(entry: str, source: str) -> Disabled:
    kind, *rest = entry.split(":")
    kinds = [k.name for k in KINDS]
    if kind not in kinds or len(rest) not in (1, 2) or not all(rest):
        raise ConfigError(
            f"{source}: {entry!r} must be kind:name or kind:distribution:name.",
            hint=f"The kinds are {', '.join(kinds)}.",
        )
    return Disabled(kind, rest[-1], canonical(rest[0]) if len(rest) == 2 else None, source)
