"""How the time of an all-reduce, and of a step, grows: workers, bytes, variables.

    make bench-growth

Three tables and plots, each with the model alpha + beta x that fits best (least squares
of the relative errors). All columns of a table take turns in one run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import (
    Driver,
    Report,
    Team,
    arguments,
    fit_line,
    human_bytes,
    median,
    plot,
    table,
)

PLAYER = str(HERE / "player.py")
SMALL = 4_000  # bytes: what takes time is the way, not the load
WORKERS = (1, 2, 3, 4, 6, 8)
STEP_WORKERS = (1, 2, 4, 8)  # TensorFlow in each of them
BYTES = (1_000_000, 4_000_000, 10_000_000, 40_000_000, 100_000_000, 400_000_000)
VARIABLES = (10, 30, 100, 300, 1_000, 2_000)
VARIABLES_BYTES = 8_000_000


# Title, transport, and what else `player.py` is told.
LINES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("all-reduce, shared memory", "auto", ()),
    ("all-reduce, TCP", "tcp", ()),
    ("step of a loop, shared memory", "auto", ("strategy",)),
)


def start(driver: Driver, line: tuple[str, str, tuple[str, ...]], size: int) -> Team:
    title, transport, kind = line
    command = [sys.executable, PLAYER, driver.path, transport, *kind]
    return driver.start_job(f"{title}, {size} workers", command, size)


class Series:
    """The samples of one line of a plot."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.samples: dict[int, list[float]] = {}

    def measure(self, x: int, team: Team, size: int, variables: int, n: int) -> None:
        calls = max(1, min(50, 2_000_000 // size))
        order = {"bytes": size, "variables": variables, "warm": 2, "calls": calls}
        by_rank = team.order({**order, "samples": n})
        self.samples.setdefault(x, []).extend(map(max, zip(*by_rank, strict=True)))

    def points(self) -> list[tuple[float, float]]:
        return [(x, median(times)) for x, times in sorted(self.samples.items())]


def show(
    report: Report,
    name: str,
    series: Sequence[Series],
    x: str,
    unit: float,
    per: str,
    *,
    log: bool,
    draw: bool,
) -> None:
    """Add a table with the models below it, and draw the plot."""
    xs = sorted({x for one in series for x in one.samples})
    label = human_bytes if x == "bytes" else str
    rows = []
    for value in xs:
        row = [label(value)]
        for one in series:
            times = one.samples.get(value)
            row.append(f"{median(times) * 1e3:.3f}" if times else "")
        rows.append(row)
    report.add(f"Milliseconds by {x}, medians:\n")
    report.add(table([x, *(one.title for one in series)], rows))
    lines: dict[str, list[tuple[float, float]]] = {}
    for one in series:
        points = one.points()
        lines[one.title] = points
        # One worker has nobody to talk to: that is no point of the line.
        fitted = [p for p in points if x != "workers" or p[0] > 1]
        if len(fitted) > 1:
            alpha, beta = fit_line(fitted)
            report.add(
                f"{one.title}: {alpha * 1e3:.3f} ms + {beta * unit * 1e3:.4f} ms x "
                f"{per}"
            )
            lines[f"model of {one.title}"] = [(v, alpha + beta * v) for v, _ in fitted]
    report.add("")
    report.data[name] = {one.title: one.samples for one in series}
    if draw:
        plot(report.folder / f"{name}.svg", lines, x, "seconds", log=log)


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4, help="in each round")
    parser.add_argument(
        "--no-strategy", action="store_true", help="without steps under a strategy"
    )
    names = ("workers", "bytes", "variables")
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    options = parser.parse_args()
    workers, sizes, counts = WORKERS, BYTES, VARIABLES
    rounds, n = options.rounds, options.samples
    if options.quick:
        workers, sizes, counts, rounds, n = (1, 2), BYTES[:2], VARIABLES[:2], 1, 1
    lines = [line for line in LINES if not (options.no_strategy and line[2])]
    report = Report(
        "How the time of an all-reduce and of a step grows",
        options.output,
        ("numpy", "tensorflow", "matplotlib"),
        repeats=f"{rounds} rounds x {n} samples per figure",
    )
    draw = not options.quick
    if "workers" in options.only:
        series = [Series(line[0]) for line in lines]
        with Driver() as driver:
            teams = [
                (one, line, size, start(driver, line, size))
                for one, line in zip(series, lines, strict=True)
                for size in workers
                if not line[2] or size in STEP_WORKERS
            ]
            for _ in range(rounds):
                for one, line, size, team in teams:
                    one.measure(size, team, SMALL, 10 if line[2] else 1, n)
        show(report, "workers", series, "workers", 1, "workers", log=False, draw=draw)
    for name, xs, unit, per in (
        ("bytes", sizes, 1e6, "MB"),
        ("variables", counts, 1.0, "variables"),
    ):
        if name not in options.only:
            continue
        series = [Series(line[0]) for line in lines]
        with Driver() as driver:
            two = [start(driver, line, 2) for line in lines]
            for x in xs:
                size, count = (x, 10) if name == "bytes" else (VARIABLES_BYTES, x)
                for _ in range(rounds):
                    for one, team in zip(series, two, strict=True):
                        one.measure(x, team, size, count, n)
        show(report, name, series, name, unit, per, log=True, draw=draw)
    report.write()


if __name__ == "__main__":
    main()
