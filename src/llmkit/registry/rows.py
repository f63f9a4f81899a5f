"""A row for every plugin that is installed, read from metadata: no plugin is imported to list it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmkit.errors import PluginError

State = Literal["found", "loaded", "disabled", "incompatible", "conflict", "broken"]

BUILTIN = "llmkit"
FROM_PYTHON = "python"
FROM_PATH = "module"


@dataclass(frozen=True)
class PluginRow:
    """One plugin.

    value: its front door, `module` or `module:attribute`. distribution, version: the package that brings it; the
    distribution is "python" for one registered by a running program and "module" for one chosen by its path.
    state: what is known of it so far, without importing it for the purpose; reason: why it is not usable.
    """

    kind: str
    name: str
    value: str
    distribution: str
    version: str
    state: State = "found"
    reason: str | None = None

    @property
    def builtin(self) -> bool:
        """Whether llmkit's own distribution brings it."""
        return self.distribution == BUILTIN

    @property
    def installed(self) -> bool:
        """Whether a distribution brings it (and not a running program or a path)."""
        return self.distribution not in (FROM_PYTHON, FROM_PATH)

    @property
    def qualified(self) -> str:
        """The choice that means this row and no other."""
        return self.name if self.distribution == FROM_PATH else f"{self.distribution}:{self.name}"

    @property
    def origin(self) -> str:
        """Where it comes from, in words."""
        if self.distribution == FROM_PYTHON:
            return "registered from Python"
        if self.distribution == FROM_PATH:
            return "given by its module path"
        return f"{self.distribution} {self.version}"

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """What tells it from every other row, whatever its state."""
        return (self.kind, self.distribution, self.name, self.value)

    def error(self, reason: str, hint: str | None = None) -> PluginError:
        """The error that says that this plugin cannot be used, and what to do."""
        message = f"The {self.kind} plugin {self.name!r} ({self.origin}) cannot be used: {reason.rstrip('.')}."
        return PluginError(message, hint=hint or self.reinstall_hint)

    @property
    def reinstall_hint(self) -> str:
        """What to do about a plugin that is broken in itself."""
        if not self.installed:
            return "Correct its code, or choose another one."
        return f"Reinstall it (pip install --force-reinstall {self.distribution}), or choose another one."
