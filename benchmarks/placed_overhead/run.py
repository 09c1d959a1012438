"""What a placement costs where there's nothing to gain: all layers on one device.

    make bench-placed-overhead

The models and the player of `benchmarks/fit`, in one process per column, bound to one
core: without a strategy, with `kerasdist.ModelParallelStrategy({".*": "CPU:0"})`, and
with TensorFlow's `OneDeviceStrategy`. They take turns, round by round, and are compared
within each round.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import Driver, Report, arguments, median, table

PLAYER = str(HERE.parent / "fit" / "player.py")
COLUMNS = {
    "plain": "no strategy",
    "placed": "ModelParallelStrategy",
    "one_device": "OneDeviceStrategy",
}
STEPS = {"mlp": 40, "cnn": 60}
HEAD = ["", "ms per step", "middle half", "page faults per step", "times no strategy"]


def rows(turns: dict[str, list[dict[str, float]]]) -> list[list[str]]:
    made = []
    for name, found in turns.items():
        times = [turn["seconds"] * 1e3 for turn in found]
        quarters = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
        pairs = zip(turns["plain"], found, strict=True)
        ratio = median(mine["seconds"] / plain["seconds"] for plain, mine in pairs)
        made.append(
            [
                COLUMNS[name],
                f"{median(times):.2f}",
                f"{quarters[0]:.2f}-{quarters[2]:.2f}",
                f"{median(turn['faults'] for turn in found):.0f}",
                f"{ratio:.3f}",
            ]
        )
    return made


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--columns", nargs="*", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--models", nargs="*", choices=STEPS, default=list(STEPS))
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    columns = ["plain", *(name for name in options.columns if name != "plain")]
    report = Report(
        "A placement on one device", options.output, repeats=f"{rounds} rounds"
    )
    for model in options.models:
        turns: dict[str, list[Any]] = {name: [] for name in columns}
        steps = 4 if options.quick else STEPS[model]
        with Driver() as driver:
            teams = {
                name: driver.start(
                    name,
                    lambda rank, name=name, model=model: [
                        *(sys.executable, PLAYER, name, model),
                        *(driver.path, str(rank), "1"),
                    ],
                    1,
                )
                for name in columns
            }
            for team in teams.values():
                team.order({"steps": steps})
            for _ in range(rounds):
                for name, team in teams.items():
                    turns[name] += team.order({"steps": steps})
        report.data[model] = turns
        report.add(f"{model}, {steps} steps in a round:\n")
        report.add(table(HEAD, rows(turns)))
    report.write()


if __name__ == "__main__":
    main()
