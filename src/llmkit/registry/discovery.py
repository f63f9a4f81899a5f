"""Read the metadata of installed distributions: which plugins there are, of which package and version."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import Distribution, PackageMetadata, distributions
from typing import NamedTuple

from llmkit.hookspecs.kinds import KINDS
from llmkit.registry.compatibility import incompatibility
from llmkit.registry.policy import canonical
from llmkit.registry.rows import BUILTIN, PluginRow, State

_KIND_OF_GROUP = {kind.group: kind.name for kind in KINDS}


class EntryPoint(NamedTuple):
    """A line of entry_points.txt."""

    group: str
    name: str
    value: str


@dataclass
class Discovery:
    """What the metadata says: a row for each plugin, and warnings about metadata that makes no sense."""

    rows: list[PluginRow] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def discover_rows() -> Discovery:
    """Look at every distribution on `sys.path`, once each; nothing is remembered between calls.

    As for Python itself, the first distribution of a name on the path hides later ones. One whose metadata cannot be
    read is a warning and not an error, since it need not concern llmkit at all.
    """
    found = Discovery()
    seen: set[str] = set()
    builtin_place: str | None = None
    for distribution in distributions():
        name = _name(distribution)
        if name in seen:
            continue
        seen.add(name)
        if name == BUILTIN:
            builtin_place = str(distribution.locate_file(""))
        try:
            found.rows += _rows(distribution, found.warnings)
        except Exception as error:  # the file is a third party's: it may be malformed in any way
            found.warnings.append(f"The metadata of {name} cannot be read: {type(error).__name__}: {error}.")
    if not any(row.builtin for row in found.rows):
        found.warnings.append(missing_builtins(builtin_place))
    found.rows.sort(key=lambda row: (row.kind, row.name, row.distribution))
    return found


def missing_builtins(place: str | None = None) -> str:
    """The sentence for a registry without a single plugin of llmkit itself."""
    where = f" (its metadata in {place} is stale or incomplete)" if place else ""
    return f"None of llmkit's own plugins is registered{where}: reinstall llmkit, for example with pip install -e ."


def _name(distribution: Distribution) -> str:
    """The canonical name, from the folder's name where that tells it: parsing metadata of every package is slow."""
    cheap = getattr(distribution, "_normalized_name", None)
    name = cheap if isinstance(cheap, str) else distribution.metadata["Name"]
    return canonical(name or "unnamed")


def _rows(distribution: Distribution, warnings: list[str]) -> Iterator[PluginRow]:
    text = distribution.read_text("entry_points.txt")
    if text is None or "llmkit." not in text:
        return
    points = [point for point in read_entry_points(text) if point.group.startswith("llmkit.")]
    if not points:
        return
    name, version, requirements = _described(distribution)
    reason = None if name == BUILTIN else incompatibility(requirements)
    for point in dict.fromkeys(points):
        kind = _KIND_OF_GROUP.get(point.group)
        if kind is None:
            warnings.append(
                f"{name} {version} registers {point.name!r} in {point.group}, which is no group of plugins; "
                f"the groups are {', '.join(_KIND_OF_GROUP)}."
            )
            continue
        state, why = _state(point, reason)
        yield PluginRow(kind, point.name, point.value, name, version, state, why)


def read_entry_points(text: str) -> list[EntryPoint]:
    """The entry points in the text of an entry_points.txt, as they stand there.

    `Distribution.entry_points` is not used: some versions, and the backport that takes its place as soon as anybody
    imports it, refuse the whole file for one value that is no reference to an object.
    """
    points: list[EntryPoint] = []
    group = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
        elif "=" in line and line[0] not in "#;":
            name, _, value = line.partition("=")
            points.append(EntryPoint(group, name.strip(), value.strip()))
    return points


def _described(distribution: Distribution) -> tuple[str, str, list[str]]:
    """Name, version and requirements; for metadata that is missing or leaves them out, what can be said instead."""
    metadata: PackageMetadata | None = distribution.metadata
    if metadata is None:  # what the backport says where there is none
        return canonical(_name(distribution)), "of unknown version", []
    name = canonical(metadata["Name"] or _name(distribution))
    requirements = metadata.get_all("Requires-Dist") or distribution.requires or []
    return name, metadata["Version"] or "of unknown version", list(requirements)


def _state(point: EntryPoint, incompatible: str | None) -> tuple[State, str | None]:
    if point.name == "auto" or ":" in point.name:
        return "broken", f"the name {point.name!r} is reserved"
    if incompatible:
        return "incompatible", incompatible
    return "found", None
