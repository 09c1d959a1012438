"""Test accuracy after equal epochs: in step, and with more and more staleness.

    make bench-staleness

scikit-learn's digits, each strategy with 1, 2 and 4 workers, three seeds each. The jobs
run one after the other: what a worker doesn't see of the others' steps depends on how
fast all of them are.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import Driver, Report, arguments, median, plot, servers, table

PLAYER = str(HERE / "player.py")
STRATEGIES = {
    "sync": "sync",
    "s=0": "max_staleness=0",
    "s=4": "max_staleness=4",
    "s=16": "max_staleness=16",
    "free": "max_staleness=None",
}
WORKERS = (1, 2, 4)
SEEDS = (0, 1)
EPOCHS = 10
# After how many epochs there's a table.
TABLES = (3, 10)


def learn(name: str, workers: int, seeds: tuple[int, ...], epochs: int) -> list[Any]:
    """For each seed, the test accuracy after each epoch and the seconds taken."""
    found = []
    with Driver() as driver:
        command = [sys.executable, PLAYER, name, driver.path]
        team = driver.start_job(
            f"{name}, {workers} workers", command, workers, servers=servers(name)
        )
        for seed in seeds:
            ranks = team.order({"seed": seed, "epochs": epochs})
            if any(rank["accuracy"] != ranks[0]["accuracy"] for rank in ranks):
                raise RuntimeError(f"{name}: the workers disagree on {ranks}.")
            found.append(ranks[0])
    return found


def mean_error(found: list[Any], epoch: int) -> float:
    errors = [1 - one["accuracy"][epoch - 1] for one in found]
    return sum(errors) / len(errors)


def main() -> None:
    parser = arguments(__doc__, HERE)
    names = list(STRATEGIES)
    parser.add_argument("--strategies", nargs="*", choices=names, default=names)
    parser.add_argument("--workers", nargs="*", type=int, default=WORKERS)
    options = parser.parse_args()
    counts, seeds, epochs = options.workers, SEEDS, EPOCHS
    if options.quick:
        counts, seeds, epochs = (2,), SEEDS[:1], 2
    report = Report(
        "Test accuracy on digits",
        options.output,
        ("numpy", "tensorflow", "keras", "scikit-learn"),
        repeats=f"{len(seeds)} seeds",
    )
    results = {
        name: {n: learn(name, n, seeds, epochs) for n in counts}
        for name in options.strategies
    }
    report.data["results"] = results
    head = ["", *(f"{n} worker{'s' * (n > 1)}" for n in counts)]

    def add(title: str, figure: Any) -> None:
        report.add(f"{title}:\n")
        rows = [
            [STRATEGIES[name], *(figure(by_count[n]) for n in counts)]
            for name, by_count in results.items()
        ]
        report.add(table(head, rows))

    def accuracies(found: list[Any], epoch: int) -> str:
        values = sorted(one["accuracy"][epoch - 1] for one in found)
        return f"{median(values):.3f} ({values[0]:.3f}-{values[-1]:.3f})"

    for epoch in [e for e in TABLES if e <= epochs] or [epochs]:
        add(
            f"Test accuracy after {epoch} epochs, median (least-most) of the seeds",
            lambda found, epoch=epoch: accuracies(found, epoch),
        )
    add(
        f"Seconds for {epochs} epochs with their evaluations, median",
        lambda found: f"{median(one['seconds'] for one in found):.1f}",
    )
    report.write()
    if not options.quick:
        most = max(counts)
        series = {
            f"{STRATEGIES[name]}, {n} worker{'s' * (n > 1)}": [
                (e, mean_error(results[name][n], e)) for e in range(1, epochs + 1)
            ]
            for name, n in [
                *([("sync", 1)] if "sync" in results and most > 1 else []),
                *((name, most) for name in results),
            ]
            if n in results[name]
        }
        plot(
            options.output / "error.svg", series, "epochs", "test error, mean of seeds"
        )


if __name__ == "__main__":
    main()
