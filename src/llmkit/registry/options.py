"""Options of a plugin: checked with its own model, errors in the user's terms."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from llmkit.errors import ConfigError, PluginChoiceError, PluginError, shown

if TYPE_CHECKING:
    from pydantic import BaseModel

    from llmkit.registry.loading import LoadedPlugin
    from llmkit.registry.registry import Registry
    from llmkit.registry.rows import PluginRow
    from llmkit.registry.selection import Selection

logger = logging.getLogger("llmkit.registry")


def validated_options(plugin: LoadedPlugin, given: Mapping[str, Any]) -> BaseModel | None:
    """An instance of `info.options` with what the user gave; None if the plugin has no options.

    Dashes and underscores are the same in names. Raises ConfigError naming the option, its key and the valid ones.
    """
    model = plugin.info.options
    prefix = f"plugins.{plugin.row.kind}.{plugin.row.name}"
    if model is None:
        if given:
            raise ConfigError(f"{prefix}.{next(iter(given))} is set, but this plugin takes no options.")
        return None
    from pydantic import ValidationError

    try:
        return model.model_validate(_known(prefix, model, given))
    except ValidationError as error:
        details = error.errors()[0]
        key = ".".join([prefix, *map(str, details["loc"])])
        raise ConfigError(f"{key}: {details['msg']}; it is {shown(details['input'])}.") from None


def _known(prefix: str, model: type[BaseModel], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options under their proper names. Unknown ones are refused here, as a model may be lax about them."""
    names = set(model.model_fields) | {f.alias for f in model.model_fields.values() if f.alias}
    options: dict[str, Any] = {}
    for key, value in given.items():
        name = key if key in names else key.replace("-", "_")
        if name not in names and model.model_config.get("extra") != "allow":
            near = difflib.get_close_matches(name, names, n=1)
            guess = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"Unknown option {prefix}.{key}.{guess} Valid: {', '.join(sorted(names)) or 'none'}.")
        if name in options:
            raise ConfigError(f"The option {prefix}.{name} is given twice.")
        options[name] = value
    return options


def check_options_of_kind(registry: Registry, kind: str) -> None:
    """Hold what is set for plugins of `kind` against their models, also of those that are not chosen: a slip in the
    options is one whoever runs. Loads the plugins that options are set for.

    Raises ConfigError for a plugin that does not exist and for options that it does not take.
    """
    for name, given in registry.policy.options.get(kind, {}).items():
        rows = _meant(registry, kind, name)
        if not rows:
            raise ConfigError(
                f"Options are set for plugins.{kind}.{name}, but there is no such plugin.",
                hint=f"Installed: {', '.join(sorted({row.name for row in registry.find(kind)})) or 'none'}.",
            )
        if len(rows) > 1 or rows[0].state == "disabled":
            continue  # nobody can choose it by this name
        try:
            plugin = registry.load_row(rows[0])
        except PluginError as error:
            logger.warning("options are set for plugins.%s.%s, which cannot be used: %s", kind, name, error.message)
            continue
        validated_options(plugin, given)


def _meant(registry: Registry, kind: str, name: str) -> list[PluginRow]:
    rows = [row for row in registry.find(kind) if name in (row.name, row.qualified)]
    if rows or ":" not in name:
        return rows
    try:
        return [registry.resolve(kind, name)]
    except PluginChoiceError:
        return []


def without_effect(options: Mapping[str, Mapping[str, Any]], selections: Iterable[Selection]) -> list[str]:
    """Keys of options that are set for plugins which were not chosen, of kinds from which one was."""
    chosen: dict[str, set[str]] = {}
    for selection in selections:
        names = chosen.setdefault(selection.kind, set())
        names |= {selection.name, f"{selection.distribution}:{selection.name}", selection.choice}
    return [
        f"plugins.{kind}.{name}"
        for kind, plugins in options.items()
        for name, given in plugins.items()
        if given and kind in chosen and name not in chosen[kind]
    ]
