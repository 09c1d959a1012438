"""One server's push and pull, with 1, 2 and 4 clients, beside copying the same bytes.

    make bench-server-throughput

A client pushes a change of a table and gets the table's values back, in one call. The
processes of all columns are started once and take turns: size by size, column by
column, several rounds of it. MB count both ways: a call with a table of 1 MB moves 2.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import Driver, Report, Team, arguments, human_bytes, median, plot, table

PLAYER = str(HERE / "player.py")
SIZES = (1_000, 10_000, 100_000, 1_000_000, 16_000_000, 64_000_000)
CLIENTS = (1, 2, 4)
TITLES = {
    "memcpy": "memcpy",
    "shared_memory": "shared memory",
    "tcp": "TCP",
}
# How long a sample is, and at how many bytes per second over all clients it's planned.
SECONDS = 0.1
PACE = 4e9
# What a call takes at least, in seconds.
LEAST = {"memcpy": 1e-6, "shared_memory": 1e-4, "tcp": 1e-4}

# Column and number of clients -> size in bytes -> one dictionary per round.
Samples = dict[tuple[str, int], dict[int, list[dict[str, float]]]]


def start(driver: Driver, name: str, clients: int) -> Team:
    command = [sys.executable, PLAYER, name, driver.path]
    if name == "memcpy":
        return driver.start(name, lambda rank: [*command, str(rank)], clients)
    return driver.start_job(name, command, clients, servers=1)


def sample(team: Team, name: str, clients: int, size: int) -> dict[str, float]:
    """One round of one figure."""
    order = {"do": "run", "bytes": size}
    calls = max(2, int(SECONDS / (LEAST[name] + 2 * size * clients / PACE)))
    team.order({**order, "calls": max(1, calls // 10)}, range(clients))
    before = team.cpu()[-1]
    answers = team.order({**order, "calls": calls}, range(clients))
    server = 0.0 if name == "memcpy" else team.cpu()[-1] - before
    span = max(a["ended"] for a in answers) - min(a["began"] for a in answers)
    return {
        "calls": calls * clients,
        "bytes": 2 * size * calls * clients,
        "seconds": span,
        "call": statistics.fmean(a["ended"] - a["began"] for a in answers) / calls,
        "client_cpu": sum(a["cpu"] for a in answers),
        "server_cpu": server,
    }


def rate(rounds: list[dict[str, float]]) -> float:
    """Bytes per second, both ways and over all clients."""
    return median(one["bytes"] / one["seconds"] for one in rounds)


def per(rounds: list[dict[str, float]], what: str, unit: str) -> float:
    """Of all rounds together: a single one is short for the system's clock of CPU."""
    return sum(one[what] for one in rounds) / sum(one[unit] for one in rounds)


def show(report: Report, samples: Samples, sizes: tuple[int, ...]) -> None:
    columns = list(samples)
    head = ["table", *(f"{TITLES[name]}, {n}" for name, n in columns)]

    def add(title: str, figure: Any, chosen: list[tuple[str, int]]) -> None:
        shown = [head[0], *(head[1 + columns.index(column)] for column in chosen)]
        report.add(f"{title}:\n")
        rows = [
            [human_bytes(size), *(figure(samples[column][size]) for column in chosen)]
            for size in sizes
        ]
        report.add(table(shown, rows))

    served = [column for column in columns if column[0] != "memcpy"]
    add("MB/s over all clients", lambda r: f"{rate(r) / 1e6:.0f}", columns)
    add(
        "Milliseconds per call of one client",
        lambda r: f"{median(one['call'] for one in r) * 1e3:.3f}",
        columns,
    )
    add(
        "CPU ms per MB, server",
        lambda r: f"{per(r, 'server_cpu', 'bytes') * 1e9:.3f}",
        served,
    )
    add(
        "CPU ms per MB, clients (memcpy: of those who copy)",
        lambda r: f"{per(r, 'client_cpu', 'bytes') * 1e9:.3f}",
        columns,
    )
    add(
        "CPU µs per call, server and client",
        lambda r: (
            f"{per(r, 'server_cpu', 'calls') * 1e6:.0f} + "
            f"{per(r, 'client_cpu', 'calls') * 1e6:.0f}"
        ),
        served,
    )


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sizes, counts, rounds = SIZES, CLIENTS, options.rounds
    if options.quick:
        sizes, counts, rounds = SIZES[:2], CLIENTS[:2], 1
    columns = [(name, n) for name in TITLES for n in counts]
    samples: Samples = {column: {size: [] for size in sizes} for column in columns}
    report = Report(
        "Push and pull of one server, float32",
        options.output,
        ("numpy",),
        repeats=f"{rounds} rounds of about {SECONDS} s per figure",
    )
    with Driver() as driver:
        teams = {name: start(driver, name, max(counts)) for name in TITLES}
        for team in teams.values():
            for size in sizes:
                team.order({"do": "prepare", "bytes": size})
        for _ in range(rounds):
            for size in sizes:
                for name, n in columns:
                    samples[name, n][size].append(sample(teams[name], name, n, size))
    report.data["samples"] = {f"{name}, {n}": v for (name, n), v in samples.items()}
    report.data["bytes_per_second"] = {
        f"{name}, {n}": {size: rate(found) for size, found in by_size.items()}
        for (name, n), by_size in samples.items()
    }
    show(report, samples, sizes)
    report.write()
    if not options.quick:
        series = {
            f"{TITLES[name]}, {n}": [
                (size, rate(by_size[size]) / 1e6) for size in sizes
            ]
            for (name, n), by_size in samples.items()
        }
        plot(options.output / "throughput.svg", series, "bytes of the table", "MB/s")


if __name__ == "__main__":
    main()
