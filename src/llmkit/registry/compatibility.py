"""Requirements: of a distribution on llmkit, and of a plugin on the libraries it needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llmkit.registry.policy import canonical

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def incompatibility(requirements: Iterable[str]) -> str | None:
    """Why a distribution with these `Requires-Dist` lines does not go with this llmkit; None if it does.

    Lines about other packages are not looked at. A line about llmkit that cannot be parsed counts as a reason.
    """
    from llmkit import __version__

    for line in requirements:
        if not line.lower().lstrip().startswith("llmkit"):
            continue
        requirement, reason = _parse(line)
        if requirement is None:
            return f"its requirement {line!r} cannot be read: {reason}"
        if canonical(requirement.name) != "llmkit" or not _applies(requirement):
            continue
        if not requirement.specifier.contains(__version__, prereleases=True):
            return f"it requires llmkit{requirement.specifier}, this is llmkit {__version__}"
    return None


def missing_requirements(requires: Iterable[str]) -> list[str]:
    """A sentence for each PEP 508 requirement that is not met by what is installed; markers are respected."""
    from importlib.metadata import PackageNotFoundError, version

    problems: list[str] = []
    for line in requires:
        requirement, reason = _parse(line)
        if requirement is None:
            problems.append(f"its requirement {line!r} cannot be read: {reason}")
            continue
        if not _applies(requirement):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            problems.append(f"it needs {_plain(requirement)}, which is not installed")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            problems.append(f"it needs {_plain(requirement)}, but {requirement.name} {installed} is installed")
    return problems


def install_hint(requires: Iterable[str], extra: str | None, distribution: str) -> str:
    """The pip command that installs what a plugin needs, and the extra that stands for it: "name" or
    "distribution[name]".

    The libraries themselves are named, since the distribution may come from a folder that pip does not know.
    """
    wanted = " ".join(f"'{line}'" for line in requires)
    command = f"Install it with: pip install {wanted}"
    if not extra:
        return f"{command}."
    return f"{command} (the extra {extra if '[' in extra else f'{distribution}[{extra}]'})."


def _parse(line: str) -> tuple[Requirement | None, str]:
    # packaging takes a while to import, and most starts have no requirement to check.
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        return Requirement(line), ""
    except InvalidRequirement as error:
        return None, str(error).splitlines()[0]


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _plain(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"
