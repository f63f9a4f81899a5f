"""A sweep as a page that needs nothing else: no script, no other host."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmkit_cli.load.curves import COLOURS, LINES, PANELS, Curve, curves, rate_name

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 420, 300, 58, 44, 14, 16


def write_page(file: Path, title: str, results: Sequence[dict[str, Any]]) -> None:
    """Write the page. Raises OSError."""
    panels = "".join(
        f"<figure><figcaption>{name}, ms</figcaption>{_svg(curves(results, metric), results)}</figure>"
        for metric, name in PANELS
    )
    legend = "".join(
        f'<span><i style="background:{c}"></i>{n}</span>' for (_, n), c in zip(LINES, COLOURS, strict=True)
    )
    columns = ("request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms",
               "p99_itl_ms", "median_e2el_ms", "p99_e2el_ms", "failed")  # fmt: skip
    rows = "".join(
        f"<tr><th>{html.escape(rate_name(row))}</th>{''.join(f'<td>{row[key]:.4g}</td>' for key in columns)}</tr>"
        for row in results
    )
    head = "".join(f"<th>{key.replace('_', ' ')}</th>" for key in ("rate", *columns))
    data = json.dumps(list(results)).replace("<", "\\u003c")
    text = _PAGE.format(
        title=html.escape(title), panels=panels, legend=legend, head=head, rows=rows, data=data, style=_STYLE
    )
    file.write_text(text, encoding="utf-8")


def _svg(lines: Sequence[Curve], results: Sequence[dict[str, Any]]) -> str:
    """A panel: axes from zero, a line a curve, each point with its values as a tooltip, those of the first with
    their rate."""
    xs, ys = (
        ticks(max(x for line in lines for x, _ in line.points)),
        ticks(max(y for line in lines for _, y in line.points)),
    )

    def place(x: float, y: float) -> tuple[float, float]:
        across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return LEFT + x / xs[-1] * across, HEIGHT - BOTTOM - y / ys[-1] * down

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for x in xs:
        at = place(x, 0)[0]
        parts.append(f'<path class="grid" d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>')
    for y in ys:
        at = place(0, y)[1]
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{y:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">output tokens/s</text>')
    for line in lines:
        places = [place(x, y) for x, y in line.points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path d="M{path}" fill="none" stroke="{line.colour}" stroke-width="2"/>')
        for (x, y), (tokens, milliseconds), row in zip(places, line.points, results, strict=True):
            tip = html.escape(f"{rate_name(row)}: {tokens:.4g} tokens/s, {line.name} {milliseconds:.4g} ms")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{line.colour}"><title>{tip}</title></circle>')
    for (x, y), row in zip(lines[0].points, results, strict=True):
        across, down = place(x, y)
        anchor = "end" if across > WIDTH / 2 else "start"
        parts.append(
            f'<text class="rate" x="{across + (-7 if anchor == "end" else 7):.1f}" y="{down + 14:.1f}" '
            f'text-anchor="{anchor}">{rate_name(row)}</text>'
        )
    return "".join(parts) + "</svg>"


def ticks(greatest: float) -> list[float]:
    """Round numbers from 0 to at least `greatest`, at most seven of them."""
    if not greatest > 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(greatest))
    step = next(s * power / 10 for s in (1, 2, 5, 10, 20, 50) if greatest <= 6 * s * power / 10)
    return [float(f"{step * i:.6g}") for i in range(math.ceil(greatest / step) + 1)]


_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #fff; --line: #d9dee4 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #14171a; --line: #343a41 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  margin: 2rem auto; max-width: 84rem; padding: 0 1rem }
h1 { font-size: 1.3rem }
.panels { display: flex; flex-wrap: wrap; gap: 1rem }
figure { flex: 1 1 320px; margin: 0 }
figcaption { font-weight: 600 }
svg { width: 100% }
text { fill: var(--ink); font-size: 11px }
.grid { stroke: var(--line) }
.legend span { margin-right: 1.5rem }
.legend i { display: inline-block; width: 1em; height: .25em; margin-right: .5em; vertical-align: middle }
.table { overflow-x: auto }
table { border-collapse: collapse; margin-top: 1rem; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--line) }
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><h1>{title}</h1><p class="legend">{legend}</p><div class="panels">{panels}</div>
<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>
<script type="application/json" id="results">{data}</script></body></html>
"""
