"""Which plugins are meant by the texts of the command line and the settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmkit.config.values import parse_literal
from llmkit.errors import ConfigError
from llmkit.hookspecs.kinds import KINDS
from llmkit.registry import Registry
from llmkit.registry.policy import canonical
from llmkit.testing.conformance.target import Conformance, conformance_of

DISTRIBUTION = "distribution"

Pair = tuple[str, str]


def parse_targets(
    specs: Sequence[str], options: Sequence[str], device: str = "auto", settings: Sequence[str] = ()
) -> list[Conformance]:
    """The plugins that the texts mean, each once, with their options.

    specs: `KIND:NAME`, NAME being any form of a choice, or `distribution:NAME` for all that a distribution brings.
    options: `KEY=VALUE` if there is but one plugin, else `KIND.NAME.KEY=VALUE`. settings: likewise, the latter form
    only; those of plugins that are not meant are passed over. Raises ConfigError for what cannot be read or is no
    option, PluginError for a plugin that does not exist or cannot be loaded.
    """
    pairs = list(dict.fromkeys(pair for spec in specs for pair in _pairs(spec)))
    given: dict[Pair, dict[str, Any]] = {pair: {} for pair in pairs}
    mine = [text for text in settings if text.startswith(tuple(f"{kind}.{choice}." for kind, choice in pairs))]
    for text in (*mine, *options):
        pair, key, value = _option(text, pairs)
        given[pair][key] = value
    return [conformance_of(*pair, given[pair], device) for pair in pairs]


def _pairs(spec: str) -> list[Pair]:
    kind, _, choice = spec.partition(":")
    if kind == DISTRIBUTION and choice:
        return _of_distribution(choice)
    kinds = [k.name for k in KINDS]
    if kind not in kinds or not choice:
        raise ConfigError(
            f"{spec!r} is not of the form KIND:NAME.",
            hint=f"For example scheduler:my-policy; the kinds are {', '.join(kinds)}.",
        )
    if choice == "auto":
        raise ConfigError(f"{spec!r} names no plugin: conformance is checked of one that is named.")
    return [(kind, choice)]


def _of_distribution(name: str) -> list[Pair]:
    rows = [row for row in Registry.discover().find() if row.distribution == canonical(name)]
    if not rows:
        raise ConfigError(f"No distribution {name!r} with plugins is installed.", hint="Install it (pip install -e .).")
    return [(row.kind, row.qualified if row.state == "conflict" else row.name) for row in rows]


def _option(text: str, pairs: Sequence[Pair]) -> tuple[Pair, str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"The option {text!r} is not of the form KEY=VALUE.")
    for kind, choice in pairs:
        prefix = f"{kind}.{choice}."
        if name.startswith(prefix):
            return (kind, choice), name.removeprefix(prefix), parse_literal(value)
    if len(pairs) != 1:
        raise ConfigError(
            f"The option {text!r} could be of any of the plugins.", hint="Write KIND.NAME.KEY=VALUE, as for --set."
        )
    return pairs[0], name, parse_literal(value)
