"""What data that differ between the workers cost: comparing them, and the chief's.

    make bench-chief-data

Two workers on one machine. Whole epochs of `fit` come in turns, so that whatever else
the machine does meets all of them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import Driver, Report, arguments, median, table

PLAYER = str(HERE / "player.py")
KINDS = ("arrays", "dataset", "generator")
ROWS, TURNS, CALLS = 40_000, 7, 200
SIZES = (10, 100, 1000)


def turns(team: Any, rows: int, count: int) -> dict[str, list[float]]:
    """Examples per second of each turn, by kind of data."""
    found: dict[str, list[float]] = {}
    for turn in range(count + 1):
        for kind in KINDS:
            for other in (False, True):
                if kind == "generator" and other:
                    continue
                order = {"do": "fit", "kind": kind, "other": other, "rows": rows}
                rate = min(team.order(order))
                if turn:  # in the first one graphs are traced
                    name = f"{kind}, {'the chiefs' if other else 'the same'}"
                    found.setdefault(name, []).append(rate)
    return found


def main() -> None:
    parser = arguments(__doc__, HERE)
    options = parser.parse_args()
    rows, count, calls, sizes = ROWS, TURNS, CALLS, SIZES
    if options.quick:
        rows, count, calls, sizes = 2_000, 1, 5, SIZES[:1]
    report = Report("Data that differ", options.output, repeats=f"{count} turns")
    with Driver() as driver:
        team = driver.start_job("two workers", [sys.executable, PLAYER, driver.path], 2)
        rates = turns(team, rows, count)
        compared = {
            size: [
                max(team.order({"do": "compare", "megabytes": size}))
                for _ in range(count)
            ]
            for size in sizes
        }
        calls_found = [
            [max(three) for three in zip(*ranks, strict=True)]
            for ranks in (
                team.order({"do": "batches", "calls": calls}) for _ in range(count)
            )
        ]
    report.data |= {"rates": rates, "compare": compared, "on_batch": calls_found}
    base = {kind: median(rates[f"{kind}, the same"]) for kind in KINDS[:2]}
    report.add(
        f"Examples per second of `fit`, epochs of {rows:,} rows of 3 KB, batches of "
        "256; median (least-most), and the ratio to the same data on all:\n"
    )
    lines = []
    for name, found in rates.items():
        kind = name.partition(",")[0]
        of = base["dataset" if kind == "generator" else kind]
        shown = name.replace("chiefs", "chief's")
        if kind == "generator":
            shown = "generator, the chief's (ratio to the dataset)"
        middle = median(found)
        lines.append(
            [
                shown,
                f"{middle:,.0f} ({min(found):,.0f}-{max(found):,.0f})",
                f"{middle / of:.2f}",
            ]
        )
    report.add(table(["data", "examples/s", "ratio"], lines))
    report.add(
        "Comparing arrays that are the same on all workers, once per `fit`, "
        "milliseconds:\n"
    )
    report.add(
        table(
            ["arrays", "median", "least-most"],
            [
                [
                    f"{size} MB",
                    f"{median(found) * 1e3:.1f}",
                    f"{min(found) * 1e3:.1f}-{max(found) * 1e3:.1f}",
                ]
                for size, found in compared.items()
            ],
        )
    )
    report.add("`train_on_batch` of 256 rows (0.8 MB), microseconds, medians:\n")
    names = ("without comparing", "as it is", "comparing alone")
    report.add(
        table(
            ["", "per call"],
            [
                [name, f"{median(found[i] for found in calls_found):,.0f}"]
                for i, name in enumerate(names)
            ],
        )
    )
    report.write()


if __name__ == "__main__":
    main()
