"""Which model plugin runs a model: the one called by its architecture, else the best that serves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmkit.errors import ModelError, PluginError
from llmkit.hookspecs.attention import Support

if TYPE_CHECKING:
    from llmkit.hookspecs.plugin import Environment
    from llmkit.registry import LoadedPlugin, Registry

SUPPORT, CONFIG = "llmkit_model_support", "llmkit_model_config"


@dataclass(frozen=True)
class ModelChoice:
    """architecture: the name in config.json that decided. plugin: the model plugin, as a choice of the registry.
    reason: why that one."""

    architecture: str
    plugin: str
    reason: str


def choose_model_plugin(
    choice: str, config: Mapping[str, Any], registry: Registry, environment: Environment, where: str
) -> ModelChoice:
    """The plugin for a model with this `config.json`. choice: `model.implementation`; "auto": the first of the
    configuration's `architectures` that a plugin is called by, else the best of those that serve any architecture.
    `where` names the model in messages.

    Raises ModelError if there is none, PluginError if the plugin that was asked for cannot be used. Code that comes
    with a model is never run.
    """
    architectures = _architectures(config, where)
    if choice != "auto":
        plugin = registry.load("model", choice)
        reasons = _support(plugin, config).reasons
        if reasons:
            raise plugin.row.error("; ".join(reasons), "Leave model.implementation (--model-impl) at auto.")
        return ModelChoice(architectures[0], choice, "named in the configuration")
    named = {row.name: row for row in registry.find("model") if row.state != "disabled"}
    for name in architectures:
        if name in named:
            return ModelChoice(name, name, "the architecture that config.json names")
    return _best_for(architectures, config, registry, environment, where)


def translated_config(plugin: str, config: Mapping[str, Any], registry: Registry) -> dict[str, Any] | None:
    """What the plugin makes of a `config.json` whose keys the core could not read; None if it reads it as it is."""
    translated = registry.load("model", plugin).ask(CONFIG, config=config)
    return None if translated is None else dict(translated)


def _architectures(config: Mapping[str, Any], where: str) -> list[str]:
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list | tuple) or not all(isinstance(name, str) for name in architectures):
        raise ModelError(f"{where} has architectures = {architectures!r}; it must be a list of names.")
    if not architectures:
        raise ModelError(
            f"{where} does not say what architecture it is.",
            hint="Set it: --set 'model.overrides.architectures=[\"…\"]'.",
        )
    return list(architectures)


def _best_for(
    architectures: list[str], config: Mapping[str, Any], registry: Registry, environment: Environment, where: str
) -> ModelChoice:
    """Of the plugins that serve any architecture, the one with the highest score, then rank."""
    rejected: dict[str, str] = {}
    usable: list[tuple[int, int, bool, str, str]] = []
    for row in registry.find("model"):
        if not registry.in_auto(row) or row.state in ("disabled", "conflict"):
            continue
        try:
            plugin = registry.load_row(row)
        except PluginError as error:
            rejected[row.name] = error.message
            continue
        if not plugin.info.auto or not plugin.implements(SUPPORT):
            continue
        problems = plugin.problems(environment)
        support = Support(reasons=tuple(problems)) if problems else _support(plugin, config)
        if support.reasons:
            rejected[row.name] = "; ".join(support.reasons)
        else:
            usable.append((-support.score, -plugin.info.rank, not row.builtin, row.name, row.qualified))
    if usable:
        reason = f"no plugin is called {' or '.join(architectures)}, and it serves that"
        return ModelChoice(architectures[0], min(usable)[3], reason)
    raise _nothing_for(architectures, config, registry, rejected, where)


def _support(plugin: LoadedPlugin, config: Mapping[str, Any]) -> Support:
    answer = plugin.ask(SUPPORT, config=config)
    if answer is None or isinstance(answer, Support):
        return answer or Support()
    raise plugin.row.error(f"its {SUPPORT} returned a {type(answer).__name__} where a Support is expected")


def _nothing_for(
    architectures: list[str], config: Mapping[str, Any], registry: Registry, rejected: Mapping[str, str], where: str
) -> ModelError:
    disabled = [row for row in registry.find("model") if row.name in architectures and row.state == "disabled"]
    if disabled:
        return ModelError(disabled[0].error(disabled[0].reason or "it is disabled").message, hint="Enable it.")
    own_code = ", and the Python code that comes with it (auto_map) is never run" if config.get("auto_map") else ""
    reasons = "".join(f" The plugin {name} does not serve it: {why.rstrip('.')}." for name, why in rejected.items())
    known = sorted(row.name for row in registry.find("model"))
    return ModelError(
        f"No model plugin is for the architecture {', '.join(architectures)} of {where}{own_code}.{reasons}",
        hint=f"Known architectures: {', '.join(known) or 'none; reinstall llmkit'}.",
    )
