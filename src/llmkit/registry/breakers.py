"""The breakers of one engine: one for every plugin that is guarded at run time."""

from __future__ import annotations

from collections.abc import Callable

from llmkit.registry.breaker import Breaker, FaultCount

OnOpen = Callable[[str, str, FaultCount], None]


class Breakers:
    """Breakers by kind and name of the plugin. on_open: told kind, name and faults each time that one opens."""

    def __init__(self, on_open: OnOpen | None = None) -> None:
        self._on_open = on_open
        self._breakers: dict[tuple[str, str], Breaker] = {}

    def of(self, kind: str, name: str, number: int = 1) -> Breaker:
        """The breaker of a plugin, made when it is first asked for. number: which one, of a plugin that is used several
        times; from the second on it is called `name #number`."""
        label = name if number == 1 else f"{name} #{number}"
        known = self._breakers.get((kind, label))
        if known is None:
            known = self._breakers[kind, label] = Breaker(kind, label, on_open=self._told(kind, name))
        return known

    def add(self, breaker: Breaker) -> None:
        """Take in a breaker that was made elsewhere, in place of one for the same plugin."""
        self._breakers[breaker.kind, breaker.name] = breaker

    def counts(self) -> dict[str, FaultCount]:
        """`kind:name` → faults, of the plugins that have had any."""
        return {f"{b.kind}:{b.name}": b.count() for b in list(self._breakers.values()) if b.num_faults}

    def _told(self, kind: str, name: str) -> Callable[[FaultCount], None] | None:
        on_open = self._on_open
        return None if on_open is None else lambda count: on_open(kind, name, count)
