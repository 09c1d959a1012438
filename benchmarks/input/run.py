"""What does a pipeline of 20 ms a batch cost four workers?

    make bench-input

Global batches have 64 rows. Kinds of data take turns, and so do columns:

- arrays: what a step takes by itself
- a `PyDataset` whose items are 20 ms away, without work for a core
- PNGs, about 20 ms of a core: `map(decode).batch(64)`, of which each worker decodes its
  own rows, and `batch(64).map(decode)`, of which each decodes all

With `shard="off"` the script gives each worker a quarter of the rows.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import Driver, Report, arguments, median, table

PLAYER = str(HERE / "player.py")
KINDS = ["arrays", "PyDataset", "map, batch", "batch, map"]
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
        "A step whose batch takes 20 ms to make, milliseconds",
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
