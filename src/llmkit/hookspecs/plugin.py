"""What every plugin's front door holds, whatever its kind: an `info` object and, optionally, `llmkit_problems`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmkit.hookspecs.markers import hookspec

if TYPE_CHECKING:
    from pydantic import BaseModel


@dataclass(frozen=True)
class PluginInfo:
    """A plugin's self-description; the front-door module binds it to the name `info`.

    summary: one line for `llmkit plugins list`.
    requires: PEP 508 requirements that must be installed for the plugin to work.
    extra: the extra of the plugin's own distribution that installs `requires`, as `llmkit[flashinfer]`.
    options: the pydantic model (with `extra="forbid"`) of the plugin's options; None if it has none.
    rank: the higher is preferred by "auto"; 0 is an ordinary plugin, negative never wins over another.
    auto: whether "auto" may choose it at all.
    """

    summary: str
    requires: tuple[str, ...] = ()
    extra: str | None = None
    options: type[BaseModel] | None = None
    rank: int = 0
    auto: bool = True


@dataclass(frozen=True)
class Environment:
    """The machine a plugin would run on, as `llmkit_problems` sees it.

    device_type: "cpu" or "cuda". compute_capability: of the CUDA device, e.g. (9, 0).
    platform: `sys.platform`. machine: `platform.machine()`. cpu_flags: instruction sets the processor reports.
    """

    device_type: str = "cpu"
    compute_capability: tuple[int, int] | None = None
    platform: str = "linux"
    machine: str = "x86_64"
    cpu_flags: frozenset[str] = field(default_factory=frozenset)

    def has_module(self, name: str) -> bool:
        """Whether the top-level module `name` can be found, without importing it."""
        return importlib.util.find_spec(name) is not None


@hookspec
def llmkit_problems(environment: Environment) -> list[str]:  # type: ignore[empty-body]
    """Why the plugin cannot work in `environment`, a sentence each; an empty list if it can.

    Called for every plugin by `llmkit plugins doctor`, and for a plugin about to be selected; must be cheap,
    must not import anything heavy and must not initialise a device.

    .. versionadded:: 0.1
    """
