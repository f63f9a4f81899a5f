"""The record of a choice."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Selection:
    """A plugin was chosen. `rejected`: for `auto`, name of every other plugin → why not that one."""

    kind: str
    choice: str
    name: str
    distribution: str
    version: str
    reason: str
    rejected: dict[str, str] = field(default_factory=dict)
