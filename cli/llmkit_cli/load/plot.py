"""Throughput against latency, over the rates of a sweep: as PNG, or as a page that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmkit.errors import ConfigError
from llmkit_cli.load.curves import PANELS, curves, rate_name
from llmkit_cli.load.plot_page import write_page


def write_plot(file: Path, title: str, results: Sequence[dict[str, Any]]) -> None:
    """Write it in the format of the file's name. Raises ConfigError."""
    writer = writer_of(file)
    try:
        writer(file, title, results)
    except OSError as error:
        raise ConfigError(f"The plot {file} cannot be written: {error}.") from error


def writer_of(file: Path) -> Callable[[Path, str, Sequence[dict[str, Any]]], None]:
    """What writes `file`. Raises ConfigError for other formats, and if the library for PNG is not installed."""
    if file.suffix in (".html", ".htm"):
        return write_page
    if file.suffix != ".png":
        raise ConfigError(f"--plot {file}: a plot is a .png or an .html file.")
    try:
        import matplotlib  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise ConfigError(
            "Plots as PNG need matplotlib.", hint="pip install 'matplotlib>=3.8', or name an .html file."
        ) from error
    return _write_png


def _write_png(file: Path, title: str, results: Sequence[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(PANELS), 4.2), layout="constrained")
    figure.suptitle(title)
    for axes, (metric, name) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for curve in curves(results, metric):
            axes.plot(*zip(*curve.points, strict=True), marker="o", color=curve.colour, label=curve.name)
        for row in results:
            place = (row["output_throughput"], row[f"median_{metric}_ms"])
            axes.annotate(rate_name(row), place, textcoords="offset points", xytext=(-5, -10), ha="right", fontsize=7)
        axes.set(title=name, xlabel="output tokens/s", ylabel="ms", xlim=(0, None), ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=150)
