"""What a plot of a sweep shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PANELS = (("ttft", "Time to first token"), ("itl", "Time between tokens"), ("e2el", "Whole request"))
LINES = (("median", "median"), ("p99", "99th percentile"))
COLOURS = ("#2563eb", "#c2410c")


@dataclass(frozen=True)
class Curve:
    """One line of a panel: output tokens a second, milliseconds."""

    name: str
    colour: str
    points: list[tuple[float, float]]


def curves(results: Sequence[dict[str, Any]], metric: str) -> list[Curve]:
    """Lines of one metric, points in the order of the rates."""
    return [
        Curve(name, colour, [(row["output_throughput"], row[f"{key}_{metric}_ms"]) for row in results])
        for (key, name), colour in zip(LINES, COLOURS, strict=True)
    ]


def rate_name(row: dict[str, Any]) -> str:
    """How a rate is written beside its point; results have the text "inf" for one without bound."""
    return "all at once" if row["request_rate"] == "inf" else f"{row['request_rate']:g}/s"
