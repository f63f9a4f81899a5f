"""What `auto` means: of the plugins that work here, the best; with a reason why not each of the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmkit.errors import LlmkitError, PluginError
from llmkit.hookspecs.attention import Support
from llmkit.hookspecs.plugin import Environment
from llmkit.registry.loading import LoadedPlugin, described
from llmkit.registry.rows import PluginRow

if TYPE_CHECKING:
    from llmkit.registry.registry import Registry

logger = logging.getLogger(__name__)

Judge = Callable[[Any], Support]


@dataclass(frozen=True)
class Contender:
    """A plugin that could be taken: what it built, and how well that suits (`support.score`)."""

    plugin: LoadedPlugin
    built: Any
    support: Support

    @property
    def order(self) -> tuple[int, int, bool, str]:
        """Sorts the best first: score, then as `preference`."""
        return (-self.support.score, *preference(self.plugin))

    @property
    def standing(self) -> str:
        """Its score and rank in words."""
        score = f"score {self.support.score}, " if self.support.score else ""
        return f"{score}rank {self.plugin.info.rank}"

    @property
    def described(self) -> str:
        """Its standing, and what speaks for it: the grounds of its score or, without those, what it is."""
        words = self.support.grounds or self.plugin.info.summary
        return f"{self.standing}: {words}" if words else self.standing


def preference(plugin: LoadedPlugin) -> tuple[int, bool, str]:
    """Sorts the best first where nothing was judged: rank, llmkit's own before others, name."""
    return (-plugin.info.rank, not plugin.row.builtin, plugin.row.name)


def judged(judge: Judge | None, built: Any) -> Support:
    """What `judge` says of an object. The object is a plugin's: if it fails when asked, that is a reason against it."""
    try:
        return judge(built) if judge else Support()
    except LlmkitError:
        raise
    except (Exception, SystemExit) as error:
        return Support(reasons=(f"it failed when asked whether it works here: {described(error)}",))


def choose_best(
    registry: Registry, kind: str, environment: Environment, judge: Judge | None, arguments: Mapping[str, Any]
) -> tuple[Contender, str, dict[str, str]]:
    """The best plugin with its object, why it is that, and name → reason for every other. Without `judge`, plugins are
    built best first until one is; with it, all are built and judged.

    Raises PluginError with every reason if none is usable, ConfigError for bad options of a candidate.
    """
    contenders: list[Contender] = []
    plugins, rejected = candidates(registry, kind, environment)
    for plugin in plugins:
        if contenders and judge is None:
            contenders.append(Contender(plugin, None, Support()))
            continue
        try:
            built = registry.build(plugin, arguments)
        except PluginError as error:
            logger.warning("%s", error)
            rejected[plugin.row.name] = error.message
            continue
        support = judged(judge, built)
        if support.reasons:
            rejected[plugin.row.name] = "; ".join(support.reasons)
        else:
            contenders.append(Contender(plugin, built, support))
    if not contenders:
        raise _nothing_usable(registry, kind, rejected)
    best, *others = sorted(contenders, key=lambda contender: contender.order)
    for other in others:
        rejected[other.plugin.row.name] = f"{best.plugin.row.name} has {best.standing}, this {other.described}"
    place = f"best of {len(contenders)} usable ones" if others else "only usable one"
    return best, f"the {place} ({best.described})", rejected


def candidates(registry: Registry, kind: str, environment: Environment) -> tuple[list[LoadedPlugin], dict[str, str]]:
    """The plugins that need building to say more, best first by rank, and name → reason for every other."""
    rejected: dict[str, str] = {}
    found: list[LoadedPlugin] = []
    for row in registry.find(kind):
        if not registry.in_auto(row):
            rejected[row.qualified] = 'not part of llmkit: auto takes it only with plugins.auto = "any"'
            continue
        outcome = _candidate(registry, row, environment)
        if isinstance(outcome, str):
            rejected[row.qualified if row.state == "conflict" else row.name] = outcome
        else:
            found.append(outcome)
    return sorted(found, key=preference), rejected


def _candidate(registry: Registry, row: PluginRow, environment: Environment) -> LoadedPlugin | str:
    """The loaded plugin, or why `auto` cannot take it."""
    # A foreign package that offers the name of one of llmkit's own plugins must not take that away from `auto`.
    only_one_seen = row.builtin and not registry.policy.any_in_auto
    if row.state == "disabled" or (row.state == "conflict" and not only_one_seen):
        return row.reason or row.state
    try:
        plugin = registry.load_row(row)
    except PluginError as error:
        return registry.reason(row) or error.message
    if not plugin.info.auto:
        return "it is used only when named"
    return "; ".join(plugin.problems(environment)) or plugin


def _nothing_usable(registry: Registry, kind: str, rejected: Mapping[str, str]) -> PluginError:
    reasons = " ".join(f"{name}: {reason.rstrip('.')}." for name, reason in rejected.items()) or "None is installed."
    return PluginError(f"No {kind} plugin can be used here.", hint=" ".join([reasons, *registry.warnings]))
