"""What does a pipeline of 20 ms a batch cost four workers?

    make bench-input

The data of a global batch of 64 rows take 20 ms, in which no core works, and the step
itself about a millisecond. Columns take turns.

- `map(...).batch(64)`: each worker makes its own rows only.
- `batch(64).map(...)`: the function gets whole batches, so each worker makes all rows.
- `shard="off"`: each worker is given a quarter of the rows by the script.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import Driver, Report, arguments, median, table

PLAYER = str(HERE / "player.py")
KINDS = ["map, batch", "batch, map"]
# Title, mode of the player, processes.
COLUMNS = {
    "plain Keras, one process": ("plain", 1),
    "four workers": ("ring", 4),
    'four workers, shard="off"': ("off", 4),
}


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    report = Report(
        "A step whose batch takes 20 ms to make, ms",
        options.output,
        repeats=f"{rounds} rounds of 50 steps",
    )
    found: dict[str, dict[str, list[float]]] = {}
    with Driver() as driver:
        teams = {}
        for name, (mode, size) in COLUMNS.items():
            command = [sys.executable, PLAYER, mode, driver.path]
            teams[name] = (
                driver.start_job(name, command, size)
                if size > 1
                else driver.start(name, lambda rank, it=command: it, 1)
            )
        for turn in range(rounds + 1):
            for name, team in teams.items():
                for kind in KINDS:
                    seconds = max(team.order({"kind": kind}))
                    if turn:  # in the first one graphs are traced
                        found.setdefault(name, {}).setdefault(kind, []).append(seconds)
    report.data["seconds"] = found
    rows = [
        [name, *(f"{median(of[kind]) * 1e3:.1f}" for kind in KINDS)]
        for name, of in found.items()
    ]
    report.add(table(["", *KINDS], rows))
    report.write()


if __name__ == "__main__":
    main()
