"""What a child process is told about the plugins of its parent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

from llmkit.errors import PluginError
from llmkit.registry.loading import LoadFailure, import_value
from llmkit.registry.policy import Disabled, PluginPolicy
from llmkit.registry.rows import FROM_PYTHON, PluginRow


@dataclass(frozen=True)
class ManifestEntry:
    """One plugin as the parent sees it; `value` is its front door, empty if it cannot be imported by a name."""

    kind: str
    name: str
    distribution: str
    version: str
    value: str


@dataclass(frozen=True)
class Manifest:
    """All plugins that the parent sees, and its plugin settings. Pickles; `to_dict` is made of JSON types."""

    entries: tuple[ManifestEntry, ...]
    policy: PluginPolicy

    def to_dict(self) -> dict[str, Any]:
        """As JSON types; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Manifest:
        """The manifest that `to_dict` wrote, also after a round trip through JSON."""
        policy = dict(data["policy"])
        policy["disabled"] = tuple(Disabled(**entry) for entry in policy["disabled"])
        return cls(tuple(ManifestEntry(**entry) for entry in data["entries"]), PluginPolicy(**policy))


def matching_rows(manifest: Manifest, here: list[PluginRow]) -> list[PluginRow]:
    """The rows of this process that are the manifest's, in its order, without plugins that the parent does not know.

    Raises PluginError naming the first plugin that is missing here, or of another version or front door.
    """
    by_identity = {(row.kind, row.name, row.distribution): row for row in here}
    rows: list[PluginRow] = []
    for entry in manifest.entries:
        if entry.distribution == FROM_PYTHON:
            rows.append(PluginRow(entry.kind, entry.name, entry.value, FROM_PYTHON, entry.version))
            continue
        row = by_identity.get((entry.kind, entry.name, entry.distribution))
        if row is None:
            raise _mismatch(entry, "is not installed here")
        if (row.version, row.value) != (entry.version, entry.value):
            raise _mismatch(entry, f"is version {row.version} ({row.value}) here")
        rows.append(row)
    return rows


def front_door_of(entry: ManifestEntry) -> Any:
    """The front door of a plugin that the parent registered from Python. Raises PluginError if it has no name here."""
    if not entry.value:
        raise _mismatch(entry, "was registered as an object that no import can find; register a module or class")
    try:
        return import_value(entry.value)
    except LoadFailure as error:
        raise _mismatch(entry, f"cannot be imported here: {error}") from error


def importable_name(front_door: Any) -> str:
    """`module` or `module:attribute` by which `front_door` can be imported again; empty if there is none."""
    if isinstance(front_door, ModuleType):
        return front_door.__name__
    module, name = getattr(front_door, "__module__", None), getattr(front_door, "__qualname__", None)
    if not module or not name or "<locals>" in name:
        return ""
    return f"{module}:{name}"


def _mismatch(entry: ManifestEntry, problem: str) -> PluginError:
    return PluginError(
        f"A child process sees other plugins than its parent: the {entry.kind} plugin {entry.name!r} of "
        f"{entry.distribution} {entry.version} ({entry.value}) {problem}.".replace("  ", " "),
        hint="If packages were changed while llmkit was running, start it again.",
    )
