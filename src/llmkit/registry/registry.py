"""The registry: finds plugins by metadata, loads the chosen ones, builds their objects, and remembers why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from llmkit.errors import PluginChoiceError, PluginError
from llmkit.hookspecs.kinds import KINDS, kind_named
from llmkit.hookspecs.plugin import Environment
from llmkit.registry.auto import Judge, candidates, choose_best, judged
from llmkit.registry.blame import blaming
from llmkit.registry.breaker import FaultCount
from llmkit.registry.breakers import Breakers
from llmkit.registry.building import call_hook
from llmkit.registry.discovery import discover_rows
from llmkit.registry.doctor import Choices, DoctorRow, diagnose
from llmkit.registry.fault_journal import FaultJournal
from llmkit.registry.loading import LoadedPlugin, LoadFailure, NoFrontDoor, load_row
from llmkit.registry.manifest import Manifest, ManifestEntry, front_door_of, importable_name, matching_rows
from llmkit.registry.observers import Observer
from llmkit.registry.options import check_options_of_kind, validated_options, without_effect
from llmkit.registry.policy import PluginPolicy, policy_from
from llmkit.registry.resolution import conflict_reason, resolve_choice
from llmkit.registry.rows import FROM_PATH, FROM_PYTHON, PluginRow
from llmkit.registry.selection import Selection
from llmkit.registry.timings import CallTiming, Timings

if TYPE_CHECKING:
    from llmkit.config import PluginsConfig


class Registry:
    """All plugins of this process. Make one with `Registry.discover()`.

    A front door is imported once per registry, when it is first chosen; its failure is remembered too.
    `selections`: what was chosen and why. `timings`: how long plugins took.
    """

    def __init__(self, rows: Iterable[PluginRow], policy: PluginPolicy, warnings: Iterable[str] = ()) -> None:
        self.policy = policy
        self.selections: list[Selection] = []
        self.timings = Timings()
        self._rows = list(rows)
        self._warnings = list(warnings)
        self._front_doors: dict[tuple[str, str, str, str], Any] = {}
        self._loaded: dict[tuple[str, str, str, str], LoadedPlugin | LoadFailure] = {}
        self._checked_strictly = not policy.strict

    @classmethod
    def discover(cls, plugins: PluginsConfig | None = None) -> Registry:
        """Everything installed, by metadata alone: no plugin is imported. Reads LLMKIT_DISABLE_PLUGINS.

        Raises ConfigError for a malformed list of plugins to disable.
        """
        found = discover_rows()
        return cls(found.rows, policy_from(plugins), found.warnings)

    # ---- what there is

    @property
    def warnings(self) -> tuple[str, ...]:
        """Metadata that cannot be read, groups that do not exist, disabled plugins that are not installed."""
        rows = [(row.kind, row.name) for row in self._rows]
        absent = [d for d in self.policy.disabled if (d.kind, d.name) not in rows]
        return (*self._warnings, *(f"{d.source}: there is no {d.kind} plugin {d.name!r} to disable." for d in absent))

    def find(self, kind: str | None = None) -> list[PluginRow]:
        """The plugins of a kind, or all, with what is known of them; imports nothing.

        Raises PluginError for a kind that does not exist."""
        if kind is not None:
            _check_kind(kind)
        return self._with_conflicts([self._with_state(row) for row in self._rows if kind in (None, row.kind)])

    def resolve(self, kind: str, choice: str) -> PluginRow:
        """The plugin that a choice means: a name, `distribution:name` or `module:attribute`; imports nothing.

        Raises PluginChoiceError if there is none, if several distributions offer it, or if it is switched off."""
        return resolve_choice(kind, choice, self.find(kind), self.policy)

    def in_auto(self, row: PluginRow) -> bool:
        """Whether `auto` may look at it: llmkit's own always, others if `plugins.auto` is "any"."""
        return row.builtin or self.policy.any_in_auto

    def reason(self, row: PluginRow) -> str | None:
        """Why a plugin is not usable, as far as it is known by now."""
        return self._with_state(row).reason

    def _with_state(self, row: PluginRow) -> PluginRow:
        if self.policy.safe_mode and row.installed and not row.builtin:
            return replace(row, state="disabled", reason="safe mode ignores packages other than llmkit")
        for entry in self.policy.disabled:
            if (entry.kind, entry.name) == (row.kind, row.name) and entry.distribution in (None, row.distribution):
                return replace(row, state="disabled", reason=f"it is disabled by {entry.source}")
        loaded = self._loaded.get(row.identity)
        if isinstance(loaded, LoadFailure):
            return replace(row, state="broken" if row.state == "found" else row.state, reason=str(loaded))
        return replace(row, state="loaded") if loaded else row

    def _with_conflicts(self, rows: list[PluginRow]) -> list[PluginRow]:
        by_name: dict[tuple[str, str], list[PluginRow]] = {}
        for row in rows:
            if row.state != "disabled":
                by_name.setdefault((row.kind, row.name), []).append(row)
        shared = {key: same for key, same in by_name.items() if len(same) > 1}
        return [
            replace(row, state="conflict", reason=conflict_reason(shared[row.kind, row.name]))
            if row.state in ("found", "loaded") and (row.kind, row.name) in shared
            else row
            for row in rows
        ]

    def of_kind(self, kind: str) -> Registry:
        """A registry of the plugins of one kind, for a process that needs no others."""
        registry = Registry([row for row in self._rows if row.kind == kind], self.policy)
        registry._front_doors.update(self._front_doors)
        return registry

    # ---- registration from Python

    def register(self, kind: str, name: str, front_door: Any) -> LoadedPlugin:
        """Add a plugin of this program. `front_door`: anything with `info` and hook implementations, or its class.

        It is checked at once; on PluginError nothing has been registered."""
        _check_kind(kind)
        if name == "auto" or ":" in name or not name:
            raise PluginError(f"A plugin cannot be called {name!r}: the name is reserved.")
        row = PluginRow(kind, name, importable_name(front_door), FROM_PYTHON, "")
        if any((r.kind, r.name, r.distribution) == (kind, name, FROM_PYTHON) for r in self._rows):
            raise PluginError(f"A {kind} plugin {name!r} is registered from Python already.")
        try:
            loaded, _ = load_row(row, front_door)
        except LoadFailure as failure:
            raise row.error(str(failure)) from failure
        self._rows.append(row)
        self._front_doors[row.identity] = front_door
        self._loaded[row.identity] = loaded
        return loaded

    def unregister(self, kind: str, name: str) -> None:
        """Take back what `register` added. Raises PluginError if there is no such plugin."""
        mine = [r for r in self._rows if (r.kind, r.name, r.distribution) == (kind, name, FROM_PYTHON)]
        if not mine:
            raise PluginError(f"No {kind} plugin {name!r} is registered from Python.")
        self._rows.remove(mine[0])
        self._front_doors.pop(mine[0].identity)
        self._loaded.pop(mine[0].identity, None)

    # ---- load

    def load(self, kind: str, name: str) -> LoadedPlugin:
        """Import and check the plugin that `name` (any form of a choice) means.

        Raises PluginError with kind, name, package, version, reason and what to do."""
        _check_kind(kind)
        return self.load_row(self.resolve(kind, name))

    def load_row(self, row: PluginRow, timeout: float | None = None) -> LoadedPlugin:
        """As `load`, for a row; `timeout`: seconds after which an import is given up. Raises PluginError."""
        known = self._loaded.get(row.identity)
        if known is None:
            known = self._loaded[row.identity] = self._try_load(row, timeout)
        if isinstance(known, LoadFailure):
            hint = f"Update it (pip install --upgrade {row.distribution})." if row.state == "incompatible" else None
            error = row.error(str(known), hint)
            if isinstance(known, NoFrontDoor) and row.distribution == FROM_PATH:
                # Whoever wrote the path chose what does not exist, as with an unknown name.
                raise PluginChoiceError(error.message, hint=error.hint) from known
            raise error from known
        return known

    def _try_load(self, row: PluginRow, timeout: float | None) -> LoadedPlugin | LoadFailure:
        if row.state in ("incompatible", "broken"):
            return LoadFailure(row.reason)
        try:
            loaded, seconds = load_row(row, self._front_doors.get(row.identity), timeout)
        except LoadFailure as failure:
            return failure
        self.timings.of(row).import_seconds = seconds
        return loaded

    # ---- create

    def create(
        self,
        kind: str,
        choice: str,
        environment: Environment,
        *,
        judge: Judge | None = None,
        reason: str = "named in the configuration",
        **hook_arguments: Any,
    ) -> Any:
        """Build the object of the chosen plugin, and record the choice in `selections`.

        choice: a name, `distribution:name`, `module:attribute`, or "auto". judge: asked about the built object; its
        reasons are an error for a named plugin, and a rejection for `auto`, which takes the highest score, then rank.
        reason: why a named plugin was chosen. hook_arguments: the hook's arguments besides `options`. Raises
        PluginError, ConfigError for bad options, and what the plugin raises on purpose (ModelError and the like).
        """
        self._before_create(kind)
        if choice == "auto":
            best, reason, rejected = choose_best(self, kind, environment, judge, hook_arguments)
            self._record(best.plugin, "auto", reason, rejected)
            return best.built
        plugin = self.load(kind, choice)
        problems = plugin.problems(environment)
        if problems:
            raise plugin.row.error("; ".join(problems), plugin.install_hint() or "Choose another one, or auto.")
        built = self.build(plugin, hook_arguments)
        support = judged(judge, built)
        if support.reasons:
            raise plugin.row.error("; ".join(support.reasons), "Choose another one, or auto.")
        self._record(plugin, choice, reason, {})
        return built

    def candidates(self, kind: str, environment: Environment) -> tuple[list[LoadedPlugin], dict[str, str]]:
        """What `auto` may choose from, best first by rank and not built, and name → reason for every other plugin."""
        self._before_create(kind)
        return candidates(self, kind, environment)

    def note_choice(self, plugin: LoadedPlugin, choice: str, reason: str, rejected: dict[str, str]) -> None:
        """Record in `selections` a choice that was made by other means than `create`."""
        self._record(plugin, choice, reason, rejected)

    def _before_create(self, kind: str) -> None:
        _check_kind(kind)
        if not self._checked_strictly:
            self.require_healthy()
            self._checked_strictly = True
        self.check_options(kind)

    def build(
        self, plugin: LoadedPlugin, arguments: Mapping[str, Any], options: Mapping[str, Any] | None = None
    ) -> Any:
        """The object of a loaded plugin, built with `options`, by default its configured ones. Raises PluginError and
        ConfigError."""
        validated = validated_options(plugin, self._options(plugin.row) if options is None else options)
        start = perf_counter()
        built = call_hook(plugin, validated, arguments)
        self.timings.of(plugin.row).create_seconds = perf_counter() - start
        return built

    def _options(self, row: PluginRow) -> Mapping[str, Any]:
        of_kind = self.policy.options.get(row.kind, {})
        return of_kind.get(row.qualified) or of_kind.get(row.name, {})

    def _record(self, plugin: LoadedPlugin, choice: str, reason: str, rejected: dict[str, str]) -> None:
        row = plugin.row
        selection = Selection(row.kind, choice, row.name, row.distribution, row.version, reason, rejected)
        if selection not in self.selections:  # a connector is built twice, for the scheduler and for the worker
            self.selections.append(selection)

    def blaming(self) -> AbstractContextManager[None]:
        """While the engine starts: what one of the chosen plugins raises by mistake becomes a PluginError naming it."""

        def chosen() -> list[LoadedPlugin]:
            names = {(s.kind, s.name, s.distribution) for s in self.selections}
            loaded = [plugin for plugin in self._loaded.values() if isinstance(plugin, LoadedPlugin)]
            return [p for p in loaded if (p.row.kind, p.row.name, p.row.distribution) in names]

        return blaming(chosen)

    def chosen(self, kind: str) -> Selection:
        """The plugin of `kind` that was chosen last. Raises PluginError if none has been."""
        found = next((s for s in reversed(self.selections) if s.kind == kind), None)
        if found is None:
            raise PluginError(f"No {kind} plugin has been chosen yet.")
        return found

    def calls(self, kind: str) -> dict[str, CallTiming]:
        """Where the calls of the plugin of `kind` that was chosen last are counted: name of the function → calls and
        time, to add to. Part of `timings`. Raises PluginError if none has been chosen."""
        chosen = self.chosen(kind)
        timing = self.timings.find(kind, chosen.name, chosen.distribution)
        assert timing is not None, "what is chosen has been loaded"
        return timing.calls

    def breakers(self) -> Breakers:
        """New breakers for an engine. When one opens that is noted in the journal, for `doctor` in other processes."""
        journal = FaultJournal()

        def note(kind: str, name: str, count: FaultCount) -> None:
            loaded = [p.row for p in self._loaded.values() if isinstance(p, LoadedPlugin)]
            for plugin in [row for row in loaded if (row.kind, row.name) == (kind, name)]:
                journal.add(plugin, count)

        return Breakers(note)

    # ---- extensions, checks, child processes

    def observers(
        self, names: Iterable[str], environment: Environment, breakers: Breakers | None = None
    ) -> tuple[Observer, ...]:
        """The extensions called `names`, loaded and checked, in this order; `breakers` count their faults. Raises
        PluginError as `create` does."""
        breakers = breakers or Breakers()
        self._before_create("extension")
        observers: list[Observer] = []
        for name in names:
            plugin = self.load("extension", name)
            problems = plugin.problems(environment)
            if problems:
                raise plugin.row.error("; ".join(problems), plugin.install_hint() or "Leave it out.")
            validated_options(plugin, self._options(plugin.row))
            self._record(plugin, name, "named in the configuration", {})
            observers.append(Observer(plugin, self.timings, breakers.of("extension", plugin.row.name)))
        return tuple(observers)

    def check_options(self, kind: str | None = None) -> None:
        """Check the options that are set for plugins of `kind`, or of all, chosen or not; loads those plugins.

        Raises ConfigError for one that is not installed, and for options that it does not take."""
        for of_kind in self.policy.options:
            if kind in (None, of_kind):
                check_options_of_kind(self, of_kind)

    def options_without_effect(self) -> list[str]:
        """Keys of options of plugins that were passed over when one of their kind was chosen."""
        return without_effect(self.policy.options, self.selections)

    def require_healthy(self, import_timeout: float = 30.0) -> None:
        """What `plugins.strict` asks for: load every plugin that is not disabled.

        Raises PluginError naming each that is broken, incompatible or offered twice. One that merely misses a library
        or a device here is not broken."""
        broken: list[str] = []
        for row in self.find():
            if row.state == "disabled":
                continue
            try:
                self.load_row(row, import_timeout)
            except PluginError as error:
                broken.append(error.message)
            else:
                if row.state == "conflict" and row.reason not in broken:
                    broken.append(str(row.reason))
        if broken:
            raise PluginError(
                "Broken plugins are installed, and plugins.strict is set. " + " ".join(broken),
                hint="Reinstall or remove them, or disable them.",
            )

    def doctor(
        self, environment: Environment, choices: Mapping[str, Choices] | None = None, import_timeout: float = 30.0
    ) -> list[DoctorRow]:
        """Load and examine every plugin. choices: kind → what the configuration chooses (None: nothing), to mark it as
        selected. import_timeout: seconds after which a plugin's import is given up."""
        return diagnose(self, environment, choices or {}, import_timeout)

    def manifest(self) -> Manifest:
        """What a child process must find again."""
        entries = (ManifestEntry(r.kind, r.name, r.distribution, r.version, r.value) for r in self._rows)
        return Manifest(tuple(entries), self.policy)

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> Registry:
        """The same registry in another process, found anew there. Raises PluginError if it would not be the same."""
        found = discover_rows()
        registry = cls((), manifest.policy, found.warnings)
        by_python = [entry for entry in manifest.entries if entry.distribution == FROM_PYTHON]
        registry._rows = [r for r in matching_rows(manifest, found.rows) if r.distribution != FROM_PYTHON]
        for entry in by_python:
            registry.register(entry.kind, entry.name, front_door_of(entry))
        return registry

    def __reduce__(self) -> tuple[Callable[[Manifest], Registry], tuple[Manifest]]:
        return Registry.from_manifest, (self.manifest(),)


def _check_kind(kind: str) -> None:
    try:
        kind_named(kind)
    except KeyError:
        kinds = ", ".join(k.name for k in KINDS)
        raise PluginChoiceError(f"There is no plugin kind {kind!r}.", hint=f"The kinds are {kinds}.") from None
