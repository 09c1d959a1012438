"""All-reduce between four hosts on a shaped wire, beside the least time possible.

    make bench-wire        # as root: it makes hosts out of network namespaces

Each host is a network namespace with an address of its own, and what it sends goes
through a token bucket (`tc tbf`) of 1 Gbit/s or 100 Mbit/s. In a ring of N hosts each
has to send 2 (N-1)/N x bytes: that, divided by the bandwidth, is the bound. Headers of
Ethernet, IP and TCP take 4.4 % of it (1,448 of 1,514 bytes are payload).
"""

from __future__ import annotations

import dataclasses
import secrets
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import (
    ROOT,
    Driver,
    Report,
    Team,
    arguments,
    cluster_env,
    human_bytes,
    median,
    plot,
    quiet_env,
    table,
)

sys.path.insert(0, str(ROOT / "tests" / "support"))
from hosts import Hosts

HOSTS = 4
PLAYER = str(HERE.parent / "all_reduce" / "player.py")
# Bits per second -> sizes in bytes.
PLAN = {
    1_000_000_000: (1_000_000, 10_000_000, 100_000_000),
    100_000_000: (1_000_000, 10_000_000),
}


@dataclasses.dataclass(frozen=True)
class Column:
    """One layout of workers; a strategy's `compression` would be one more field."""

    title: str
    workers_per_host: int
    transport: str


COLUMNS = {
    "ring": Column("ring, 1 worker per host", 1, "tcp"),
    "flat": Column("flat ring, 2 workers per host", 2, "tcp"),
    "hierarchical": Column("hierarchical, 2 workers per host", 2, "hierarchical"),
}


def shape(hosts: Hosts, rate: int) -> None:
    """Let every host send no faster than `rate` bits per second."""
    # What may be sent at once after a pause: little, or small sizes beat the bound.
    burst = max(16_000, rate // 8 // 1000)
    for host in range(HOSTS):
        subprocess.run(
            [
                *hosts.prefix(host),
                *("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf"),
                *("rate", f"{rate}bit", "burst", str(burst), "latency", "400ms"),
            ],
            check=True,
        )


def start(driver: Driver, hosts: Hosts, name: str, column: Column, base: int) -> Team:
    places = [h for h in range(HOSTS) for _ in range(column.workers_per_host)]
    # In namespaces of their own these ports are free.
    addresses = [f"{hosts.address(h)}:{base + rank}" for rank, h in enumerate(places)]
    secret = secrets.token_hex(32)
    return driver.start(
        name,
        lambda rank: [
            *hosts.prefix(places[rank]),
            *(sys.executable, PLAYER, column.transport, driver.path),
        ],
        len(places),
        lambda rank: {**quiet_env(), **cluster_env(addresses, rank, secret)},
    )


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=2, help="in each round")
    options = parser.parse_args()
    plan, rounds, columns = PLAN, options.rounds, COLUMNS
    if options.quick:
        plan, rounds, options.samples = {1_000_000_000: (100_000,)}, 1, 2
        columns = {"ring": COLUMNS["ring"]}
    if reason := Hosts.available():
        sys.exit(f"This benchmark can't run here: {reason}.")
    report = Report(
        f"All-reduce of float32 between {HOSTS} hosts on a shaped wire",
        options.output,
        ("numpy",),
        repeats=f"{rounds} rounds x {options.samples} samples per figure",
    )
    samples: dict[str, list[float]] = {}
    with Hosts(HOSTS) as hosts, Driver() as driver:
        teams = {
            name: start(driver, hosts, name, column, 5000 + 100 * place)
            for place, (name, column) in enumerate(columns.items())
        }
        for _ in range(rounds):
            for rate, sizes in plan.items():
                shape(hosts, rate)
                for size in sizes:
                    for name, team in teams.items():
                        ranks = HOSTS * COLUMNS[name].workers_per_host
                        order = {"bytes": size, "ranks": ranks, "warm": 1, "calls": 1}
                        by_rank = team.order({**order, "samples": options.samples})
                        samples.setdefault(f"{name} {rate} {size}", []).extend(
                            map(max, zip(*by_rank, strict=True))
                        )
    report.data["samples"] = samples
    rows = []
    series: dict[str, list[tuple[float, float]]] = {}
    for rate, sizes in plan.items():
        wire = f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"
        for size in sizes:
            bound = 2 * (HOSTS - 1) / HOSTS * size * 8 / rate
            row = [f"{wire}, {human_bytes(size)}", f"{bound * 1e3:.1f}"]
            for name, column in columns.items():
                value = median(samples[f"{name} {rate} {size}"])
                row.append(f"{value * 1e3:.1f} ({bound / value:.2f})")
                series.setdefault(f"{column.title}, {wire}", []).append((size, value))
            series.setdefault(f"bound, {wire}", []).append((size, bound))
            rows.append(row)
    report.data["rows"] = rows
    head = ["wire, bytes", "bound", *(c.title for c in columns.values())]
    report.add("Milliseconds, medians, and in brackets the part of the bound:\n")
    report.add(table(head, rows))
    report.add("To be reached by the ring with 1 worker per host: 0.90.\n")
    report.write()
    if not options.quick:
        plot(options.output / "wire.svg", series, "bytes", "seconds")


if __name__ == "__main__":
    main()
