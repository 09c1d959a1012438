"""From samples to figures, tables and plots. Figures are medians; times in seconds."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["fit_line", "human_bytes", "median", "plot", "table", "timed"]

median = statistics.median


def human_bytes(count: float) -> str:
    """For instance `10 KB`; 1 KB is 1,000 bytes."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count:g} B"


def timed(call: Callable[[], Any], calls: int, samples: int) -> list[float]:
    """Seconds per call: `samples` times the mean over `calls` calls in a row."""
    times = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls)
    return times


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table, the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = []
    for row in cells:
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(padded)} |")
    rule = [
        "-" * width if i == 0 else "-" * (width - 1) + ":"
        for i, width in enumerate(widths)
    ]
    lines.insert(1, f"| {' | '.join(rule)} |")
    return "\n".join(lines) + "\n"


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit time = alpha + beta x, with small relative errors at all sizes.

    Least squares of the relative errors, so that the smallest size counts as much
    as the largest.

    Returns:
        alpha, in seconds, and beta, in seconds per unit of x.
    """
    import numpy as np

    x, y = np.array(points, float).T
    a = np.stack([1 / y, x / y], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(a, np.ones(len(points)), rcond=None)
    return float(alpha), float(beta)


def plot(
    path: Path,
    series: Mapping[str, Sequence[tuple[float, float]]],
    x: str,
    y: str,
    *,
    log: bool = True,
) -> None:
    """Draw lines through measured points, as SVG."""
    import matplotlib as mpl

    mpl.use("svg")
    # The same picture gives the same file.
    mpl.rcParams["svg.hashsalt"] = "kerasdist"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, points in series.items():
        style = "--" if name.startswith(("model", "bound")) else "o-"
        axes.plot(*zip(*points, strict=True), style, label=name, markersize=4)
    if log:
        axes.set_xscale("log")
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    # A line for each part with a name, instead of one for each point. Text is drawn
    # as paths, so that white space means nothing.
    path.write_text(
        re.sub(r"\n(?! *<g id=|$) *", " ", path.read_text("utf-8")), "utf-8"
    )
