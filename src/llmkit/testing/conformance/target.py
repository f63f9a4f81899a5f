"""A plugin on trial: what the suites are given of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from llmkit.config.values import parse_literal
from llmkit.errors import ConfigError
from llmkit.hookspecs.kinds import KINDS
from llmkit.registry import Registry, detect_environment
from llmkit.registry.options import validated_options
from llmkit.testing.conformance.arguments import default_arguments

if TYPE_CHECKING:
    from pydantic import BaseModel

    from llmkit.hookspecs.plugin import Environment, PluginInfo
    from llmkit.registry import LoadedPlugin, PluginTiming


@dataclass(frozen=True)
class Conformance:
    """The fixture `conformance`: one plugin, loaded, usable in `environment`, with checked options.

    kind, choice: as given; `choice` is any form of a name. options: an instance of `info.options`, None if the plugin
    has none. given: the options that were set, the others are defaults. device: "cpu" or "cuda".
    """

    kind: str
    choice: str
    registry: Registry
    environment: Environment
    plugin: LoadedPlugin = field(repr=False)
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The plugin's name; for one given as `module:attribute`, that."""
        return self.plugin.row.name

    @property
    def info(self) -> PluginInfo:
        return self.plugin.info

    @property
    def options(self) -> BaseModel | None:
        return validated_options(self.plugin, self.given)

    @property
    def device(self) -> str:
        return self.environment.device_type

    @property
    def timing(self) -> PluginTiming:
        """How long its import and the last `create` took."""
        return self.registry.timings.of(self.plugin.row)

    def create(self, **hook_arguments: Any) -> Any:
        """What the plugin's hook returns: a new object each time. Arguments of the hook besides `options` that are not
        given are made up (`llmkit.testing.conformance.arguments`); for an extension, its observer.

        Raises PluginError if the hook fails or returns something else than its contract says."""
        if self.kind == "extension":
            return self.registry.observers([self.choice], self.environment)[0]
        missing = default_arguments(self.kind, self.registry, self.environment, self.name, frozenset(hook_arguments))
        return self.registry.build(self.plugin, {**missing, **hook_arguments})

    def with_options(self, **options: Any) -> Conformance:
        """The same plugin with other options. Raises ConfigError if they are not valid."""
        return conformance_of(self.kind, self.choice, {**self.given, **options}, self.device)


def conformance_of(kind: str, choice: str, options: Mapping[str, Any], device: str = "auto") -> Conformance:
    """The plugin `choice` of `kind`, loaded and checked. `device`: "cpu", "cuda", or "auto": a GPU if there is one and
    the plugin can use it, else the CPU.

    Raises PluginError if there is no such plugin, if it cannot be loaded or not be used here; ConfigError for options
    that it does not take.
    """
    registry = Registry.discover()
    plugin = registry.load(kind, choice)
    registry.policy = replace(registry.policy, options={kind: {plugin.row.name: dict(options)}})
    validated_options(plugin, options)
    environment = _environment(plugin, device)
    problems = plugin.problems(environment)
    if problems:
        raise plugin.row.error(
            "; ".join(problems), plugin.install_hint() or "Run it on a machine that has what it needs."
        )
    return Conformance(kind, choice, registry, environment, plugin, dict(options))


def _environment(plugin: LoadedPlugin, device: str) -> Environment:
    from llmkit.engine.device import resolve_device

    if device != "auto":
        return detect_environment(resolve_device(device))
    best = detect_environment(resolve_device("auto"))
    return detect_environment("cpu") if plugin.problems(best) else best


def parse_targets(specs: Sequence[str], options: Sequence[str], device: str = "auto") -> list[Conformance]:
    """The plugins that `KIND:NAME` texts mean, each once, with their options.

    options: `KEY=VALUE` for the only plugin, or `KIND.NAME.KEY=VALUE`. Raises ConfigError and PluginError with what is
    wrong with them, as `conformance_of` does."""
    pairs = list(dict.fromkeys(_split(spec) for spec in specs))
    given: dict[tuple[str, str], dict[str, Any]] = {pair: {} for pair in pairs}
    for text in options:
        pair, key, value = _option(text, pairs)
        given[pair][key] = value
    return [conformance_of(kind, choice, given[kind, choice], device) for kind, choice in pairs]


def _split(spec: str) -> tuple[str, str]:
    kind, _, choice = spec.partition(":")
    kinds = [k.name for k in KINDS]
    if kind not in kinds or not choice:
        raise ConfigError(
            f"{spec!r} is not of the form KIND:NAME.",
            hint=f"For example scheduler:my-policy; the kinds are {', '.join(kinds)}.",
        )
    if choice == "auto":
        raise ConfigError(f"{spec!r} names no plugin: conformance is checked of one that is named.")
    return kind, choice


def _option(text: str, pairs: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], str, Any]:
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
