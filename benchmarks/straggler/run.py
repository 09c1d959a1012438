"""An epoch of three workers, of which one is five times slower than the others.

    make bench-straggler

What a step takes is a sleep in a callback: 20 ms, and 100 ms for a slow worker. The
model is so small that computing doesn't count on a machine with fewer cores than
workers. All columns have the same rows in an epoch, in batches of 32 rows per worker;
they take turns, round by round.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import Driver, Report, arguments, median, servers, table

PLAYER = str(HERE / "player.py")
WORKERS = 3
BATCH = 32  # as in `player.py`
COLUMNS = {
    "ring": "RingStrategy",
    "sync": "sync",
    "s=4": "max_staleness=4",
    "s=16": "max_staleness=16",
    "free": "max_staleness=None",
}
CASES = {
    "always": "Always the same worker is slow",
    "turns": "Each worker is slow for 5 of 15 steps, one after the other",
}
# Steps of all workers in an epoch.
STEPS = 90

Turn = list[dict[str, float]]


def rows(turns: dict[str, list[Turn]], steps: int) -> list[list[str]]:
    times = {
        name: [max(rank["seconds"] for rank in turn) for turn in found]
        for name, found in turns.items()
    }
    made = []
    for name, found in times.items():
        quarters = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
        shares = [
            f"{median(turn[rank]['steps'] for turn in turns[name]):.0f}"
            for rank in range(WORKERS)
        ]
        # Of the same round.
        faster = "-"
        if "sync" in times:
            pairs = zip(times["sync"], found, strict=True)
            faster = f"{median(a / b for a, b in pairs):.2f}"
        made.append(
            [
                COLUMNS[name],
                f"{median(found):.2f}",
                f"{quarters[0]:.2f}-{quarters[2]:.2f}",
                f"{median(steps * BATCH / seconds for seconds in found):.0f}",
                faster,
                " + ".join(shares),
            ]
        )
    return made


HEAD = [
    "",
    "seconds per epoch",
    "middle half",
    "examples/s",
    "times as fast as sync",
    "steps of each worker",
]


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--columns", nargs="*", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    steps, rounds = (12, 1) if options.quick else (STEPS, options.rounds)
    report = Report(
        f"{WORKERS} workers, one of which is 5 times slower",
        options.output,
        repeats=f"{rounds} rounds",
    )
    samples: dict[str, dict[str, list[Any]]] = {
        case: {name: [] for name in options.columns} for case in CASES
    }
    with Driver() as driver:
        teams = {
            name: driver.start_job(
                name,
                [sys.executable, PLAYER, name, driver.path],
                WORKERS,
                servers=servers(name),
            )
            for name in options.columns
        }
        for team in teams.values():
            team.order({"steps": 6, "turns": False})
        for _ in range(rounds):
            for case, by_name in samples.items():
                for name, team in teams.items():
                    order = {"steps": steps, "turns": case == "turns"}
                    by_name[name].append(team.order(order))
    for case, title in CASES.items():
        report.data[case] = samples[case]
        report.add(f"{title}, {steps} steps in an epoch:\n")
        report.add(table(HEAD, rows(samples[case], steps)))
    report.write()


if __name__ == "__main__":
    main()
