"""What crosses the network of a table of a million rows, by the rows that are used.

    make bench-embedding-rows

Two workers, two servers, in step (`max_staleness=0`), SGD: a step of each looks up 10,
100 or 1000 rows of a table of 1,000,000 x 64 float32, 256 MB. "rows" is a Keras
`Embedding`, "whole" the same table in a layer of another class, which is sent like any
weights; "plain" is Keras in one process, without a strategy. One column after the
other, for the sake of memory.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import Driver, Report, arguments, human_bytes, median, table

PLAYER = str(HERE / "player.py")
ELEMENTS = 64
COLUMNS = {
    "rows": "embedding: rows",
    "whole": "the table is sent whole",
    "plain": "plain Keras, one process",
}
TOUCHED = (10, 100, 1000)


def line(name: str, touched: int, ranks: list[list[list[float]]]) -> list[str]:
    # The first step traces the graph, and in the last one a worker may be alone.
    steps = [step for rank in ranks for step in rank[1:-1]]
    seconds, sent, received = (median(step[i] for step in steps) for i in range(3))
    return [
        COLUMNS[name],
        str(touched),
        "-" if name == "plain" else human_bytes(round(sent, -2)),
        "-" if name == "plain" else human_bytes(round(received, -2)),
        f"{1000 * seconds:.1f}",
        f"{1 / seconds:.1f}",
    ]


HEAD = [
    "",
    "rows per step",
    "sent per step",
    "received per step",
    "ms per step",
    "steps/s of a worker",
]


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--columns", nargs="*", choices=COLUMNS, default=list(COLUMNS))
    options = parser.parse_args()
    rows = 20_000 if options.quick else 1_000_000
    steps = {"rows": 30, "whole": 6, "plain": 30}
    report = Report(
        f"A table of {rows} x {ELEMENTS} float32, {human_bytes(rows * ELEMENTS * 4)}",
        options.output,
        repeats="30 steps (6 of the whole table), medians over the steps",
    )
    samples: dict[str, dict[str, Any]] = {}
    for name in options.columns:
        samples[name] = {}
        with Driver() as driver:
            team = driver.start_job(
                name,
                [sys.executable, PLAYER, name, driver.path],
                1 if name == "plain" else 2,
                {"TABLE_ROWS": str(rows)},
                servers=0 if name == "plain" else 2,
            )
            for touched in TOUCHED:
                order = {
                    "touched": touched,
                    "steps": 4 if options.quick else steps[name],
                    "seed": touched,
                }
                samples[name][str(touched)] = team.order(order)
    report.data["steps"] = samples
    lines = [
        line(name, int(touched), ranks)
        for name, found in samples.items()
        for touched, ranks in found.items()
    ]
    report.add(table(HEAD, lines))
    report.write()


if __name__ == "__main__":
    main()
