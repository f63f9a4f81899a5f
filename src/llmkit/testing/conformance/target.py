"""A plugin on trial: what the suites are given of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from llmkit.registry import Registry, detect_environment
from llmkit.registry.options import validated_options
from llmkit.testing.conformance.arguments import default_arguments

if TYPE_CHECKING:
    from pydantic import BaseModel

    from llmkit.hookspecs.plugin import Environment, PluginInfo
    from llmkit.registry import LoadedPlugin, PluginTiming


@dataclass(frozen=True)
class Conformance:
    """The fixture `conformance`: one plugin, loaded, with checked options, usable in `environment` unless `problems`
    say why not.

    kind, choice: as given; `choice` is any form of a name. given: the options that were set, the others are defaults.
    """

    kind: str
    choice: str
    registry: Registry
    environment: Environment
    plugin: LoadedPlugin = field(repr=False)
    given: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The plugin's name; for one given as `module:attribute`, that."""
        return self.plugin.row.name

    @property
    def info(self) -> PluginInfo:
        return self.plugin.info

    @property
    def options(self) -> BaseModel | None:
        """An instance of `info.options` with what was given, None if the plugin has none."""
        return validated_options(self.plugin, self.given)

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""
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
        """The same plugin with these options besides those that were given. Raises ConfigError if they are not
        valid."""
        return conformance_of(self.kind, self.choice, {**self.given, **options}, self.device)


def conformance_of(kind: str, choice: str, options: Mapping[str, Any], device: str = "auto") -> Conformance:
    """The plugin `choice` of `kind`, loaded and checked. `device`: "cpu", "cuda", or "auto": a GPU if there is one and
    the plugin can use it, else the CPU.

    Raises PluginError if there is no such plugin or it cannot be loaded, ConfigError for options that it does not take.
    """
    registry = Registry.discover()
    plugin = registry.load(kind, choice)
    registry.policy = replace(registry.policy, options={kind: {plugin.row.name: dict(options)}})
    validated_options(plugin, options)
    environment = _environment(plugin, device)
    problems = tuple(plugin.problems(environment))
    return Conformance(kind, choice, registry, environment, plugin, dict(options), problems)


def _environment(plugin: LoadedPlugin, device: str) -> Environment:
    if device == "cpu":
        return detect_environment()
    from llmkit.engine.device import resolve_device  # imports torch

    if device != "auto":
        return detect_environment(resolve_device(device))
    best = detect_environment(resolve_device("auto"))
    return detect_environment("cpu") if plugin.problems(best) else best
