"""What a trace in Chrome's format says of an engine's steps: time by part, by operation, and of the device."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmkit.metrics.step_parts import PREFIX

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Event = dict[str, Any]


@dataclass
class Share:
    """calls, and milliseconds in all; of a part, without the parts within it."""

    calls: int = 0
    ms: float = 0.0

    def add(self, microseconds: float) -> None:
        self.calls += 1
        self.ms += microseconds / 1e3


@dataclass
class TraceSummary:
    """steps: those whose result was waited for. wall_ms: from the first part to the end of the last one. parts: of the
    host, by name. operations: torch's on the host, without those within them. kernels: of the device. device_busy_ms:
    in which at least one of these ran, of device_ms from the first to the last; both 0 without a device."""

    steps: int = 0
    wall_ms: float = 0.0
    parts: dict[str, Share] = field(default_factory=lambda: defaultdict(Share))
    operations: dict[str, Share] = field(default_factory=lambda: defaultdict(Share))
    kernels: dict[str, Share] = field(default_factory=lambda: defaultdict(Share))
    device_busy_ms: float = 0.0
    device_ms: float = 0.0


def read_trace(path: Path) -> list[Event]:
    """The events of a trace with a beginning and a duration; `.gz` or not."""
    content = path.read_bytes()
    trace = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    return [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]


def summarised(events: Iterable[Event]) -> TraceSummary:
    """Add up a trace. Times are in microseconds there."""
    summary = TraceSummary()
    hosts: dict[Any, list[Event]] = defaultdict(list)
    parts, device = [], []
    for event in events:
        category, name = event.get("cat"), str(event["name"])
        if category in _DEVICE:
            device.append(event)
            summary.kernels[name].add(event["dur"])
        elif category == "user_annotation" and name.startswith(PREFIX):
            parts.append(event)
        elif category == "cpu_op":
            hosts[event.get("tid")].append(event)
    for name, own in _own_times(parts):
        summary.parts[name.removeprefix(PREFIX)].add(own)
    for thread in hosts.values():
        for name, own in _own_times(thread):
            summary.operations[name].add(own)
    summary.steps = summary.parts["wait"].calls if "wait" in summary.parts else 0
    summary.wall_ms = _span(parts) / 1e3
    summary.device_ms, summary.device_busy_ms = _span(device) / 1e3, _busy(device) / 1e3
    return summary


def _own_times(events: list[Event]) -> list[tuple[str, float]]:
    """Name and duration of events of one thread, without what lies within them."""
    own: list[list[Any]] = []
    open_events: list[tuple[float, int]] = []  # end, index
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        start, duration = event["ts"], event["dur"]
        while open_events and open_events[-1][0] <= start:
            open_events.pop()
        if open_events:
            own[open_events[-1][1]][1] -= duration
        open_events.append((start + duration, len(own)))
        own.append([str(event["name"]), duration])
    return [(name, max(0.0, duration)) for name, duration in own]


def _span(events: list[Event]) -> float:
    if not events:
        return 0.0
    return float(max(event["ts"] + event["dur"] for event in events) - min(event["ts"] for event in events))


def _busy(events: list[Event]) -> float:
    """Time in which at least one event goes on."""
    busy, reached = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        end = event["ts"] + event["dur"]
        busy += max(0.0, end - max(event["ts"], reached))
        reached = max(reached, end)
    return float(busy)
