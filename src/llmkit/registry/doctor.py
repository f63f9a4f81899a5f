"""Diagnosis of every plugin: found, selected, loadable, usable here, and if not, why and what to install."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmkit.errors import PluginError
from llmkit.hookspecs.kinds import KINDS
from llmkit.hookspecs.plugin import Environment
from llmkit.registry.auto import preference
from llmkit.registry.fault_journal import FaultJournal, FaultRecord
from llmkit.registry.loading import LoadedPlugin
from llmkit.registry.rows import FROM_PATH, FROM_PYTHON, PluginRow

if TYPE_CHECKING:
    from llmkit.registry.registry import Registry


# What a configuration chooses of a kind: one name, several (extensions), or nothing.
Choices = str | Sequence[str] | None


@dataclass(frozen=True)
class DoctorRow:
    """One plugin. `reasons`: why it is not loadable or not usable here, a sentence each; `hint`: what to do.
    `faults`: that it was left alone in an engine of late, because it had failed again and again."""

    kind: str
    name: str
    distribution: str
    version: str
    summary: str
    found: bool
    selected: bool
    loadable: bool
    usable: bool
    reasons: tuple[str, ...] = ()
    hint: str | None = None
    import_seconds: float | None = None
    faults: FaultRecord | None = None


Examined = tuple[DoctorRow, LoadedPlugin | None]


def diagnose(
    registry: Registry, environment: Environment, choices: Mapping[str, Choices], timeout: float
) -> list[DoctorRow]:
    """A row for every plugin, loading each, one for every choice that is not among them, and one for every plugin that
    no package brings and that has failed of late."""
    rows: list[DoctorRow] = []
    for kind in KINDS:
        examined = [_examine(registry, row, environment, timeout) for row in registry.find(kind.name)]
        wanted = choices.get(kind.name) or ()
        chosen = [
            _chosen(registry, kind.name, choice, examined, timeout, environment)
            for choice in ((wanted,) if isinstance(wanted, str) else wanted)
        ]
        rows += [replace(row, selected=True) if row in chosen else row for row, _ in examined]
        here = [row for row, _ in examined]
        rows += [replace(row, selected=True) for row in chosen if row is not None and row not in here]
    return rows + _with_faults_only(rows)


def _with_faults_only(rows: list[DoctorRow]) -> list[DoctorRow]:
    """Plugins that a program has registered or a command was given by their path, and that have failed of late. They
    are not loaded: what was meant may be another module here."""
    known = {(row.kind, row.name, row.distribution) for row in rows}
    return [
        DoctorRow(
            record.kind,
            record.name,
            record.distribution,
            record.version,
            "",
            found=False,
            selected=False,
            loadable=False,
            usable=False,
            reasons=("It belongs to no package, and this configuration does not choose it; only its faults are told.",),
            faults=record,
        )
        for record in FaultJournal().recent()
        if record.distribution in (FROM_PATH, FROM_PYTHON)
        and (record.kind, record.name, record.distribution) not in known
    ]


def _examine(registry: Registry, row: PluginRow, environment: Environment, timeout: float) -> Examined:
    def result(summary: str, loadable: bool, reasons: tuple[str, ...], hint: str | None) -> DoctorRow:
        return DoctorRow(
            row.kind,
            row.name,
            row.distribution,
            row.version,
            summary,
            found=True,
            selected=False,
            loadable=loadable,
            usable=loadable and not reasons,
            reasons=reasons,
            hint=hint,
            import_seconds=registry.timings.of(row).import_seconds,
            faults=FaultJournal().find(row),
        )

    if row.state == "disabled":
        return result("", False, (row.reason or "disabled",), None), None
    try:
        plugin = registry.load_row(row, timeout)
    except PluginError as error:
        return result("", False, (registry.reason(row) or error.message,), error.hint), None
    reasons = tuple(plugin.problems(environment))
    if row.state == "conflict" and row.reason:
        reasons = (row.reason, *reasons)
    hint = plugin.install_hint() or (f"Choose it as {row.qualified}." if row.state == "conflict" else None)
    return result(plugin.info.summary, True, reasons, hint), plugin


def _chosen(
    registry: Registry, kind: str, choice: str, examined: list[Examined], timeout: float, environment: Environment
) -> DoctorRow | None:
    """The row that `choice` selects: one of those examined, or a new one if it is none of them; None if `auto` finds
    nothing usable."""
    if choice == "auto":
        usable = [
            (preference(plugin), row)
            for row, plugin in examined
            if plugin and row.usable and plugin.info.auto and registry.in_auto(plugin.row)
        ]
        return min(usable, key=lambda pair: pair[0])[1] if usable else None
    try:
        wanted = registry.resolve(kind, choice)
    except PluginError as error:
        return DoctorRow(
            kind,
            choice,
            "",
            "",
            "",
            found=False,
            selected=True,
            loadable=False,
            usable=False,
            reasons=(error.message,),
            hint=error.hint,
        )
    same = [row for row, _ in examined if (row.name, row.distribution) == (wanted.name, wanted.distribution)]
    return same[0] if same else _examine(registry, wanted, environment, timeout)[0]
