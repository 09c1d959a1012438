"""Do two sites on a slow line learn what two machines beside each other learn?

    make bench-local-steps     # as root: it makes hosts out of network namespaces

Two workers on two hosts, whose link is shaped to 10 Mbit/s, train the digits model of
`examples/digits.py` for 20 epochs of 22 steps: whole gradients, compressed ones, local
steps, DiLoCo. Losses are those of 450 rows that weren't trained on.
"""

from __future__ import annotations

import json
import secrets
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import ROOT, Driver, Report, Team, arguments, cluster_env, quiet_env, table

sys.path.insert(0, str(ROOT / "tests" / "support"))
from hosts import Hosts

PLAYER = str(HERE / "player.py")
RATE = 10_000_000  # bits per second
COLUMNS: dict[str, dict[str, Any]] = {
    "whole gradients": {},
    "PowerSGD(rank=2)": {"rank": 2},
    "TopK(ratio=0.01)": {"ratio": 0.01},
    "local_steps=4": {"local_steps": 4},
    "local_steps=11": {"local_steps": 11},
    # The outer momentum makes steps seven times as long.
    "LocalSteps(11, outer='nesterov')": {
        "local_steps": 11,
        "outer": "nesterov",
        "rate": 0.1 / 7,
    },
}


def shape(hosts: Hosts) -> None:
    """Let both hosts send no faster than the rate."""
    for host in range(2):
        subprocess.run(
            [
                *hosts.prefix(host),
                *("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf"),
                *("rate", f"{RATE}bit", "burst", "20000", "latency", "1000ms"),
            ],
            check=True,
        )


def start(driver: Driver, hosts: Hosts, name: str) -> Team:
    addresses = [f"{hosts.address(host)}:5000" for host in range(2)]
    secret = secrets.token_hex(32)
    return driver.start(
        name,
        lambda rank: [
            *hosts.prefix(rank),
            *(sys.executable, PLAYER, driver.path, str(rank)),
        ],
        2,
        lambda rank: {
            **quiet_env(),
            **cluster_env(addresses, rank, secret),
            "RING_OPTIONS": json.dumps(COLUMNS[name]),
        },
    )


def bytes_sent(hosts: Hosts) -> int:
    """Return how many bytes host 0 has sent."""
    done = subprocess.run(
        [*hosts.prefix(0), "cat", "/sys/class/net/eth0/statistics/tx_bytes"],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout)


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    if reason := Hosts.available():
        sys.exit(f"This benchmark can't run here: {reason}.")
    seeds, epochs = (1, 1) if options.quick else (options.seeds, options.epochs)
    names = ["local_steps=11"] if options.quick else list(COLUMNS)
    report = Report(
        f"Digits with two workers over {RATE / 1e6:g} Mbit/s, {epochs} epochs",
        options.output,
        repeats=f"{seeds} seeds",
    )
    found: dict[str, list[dict[str, float]]] = {}
    rows = []
    for name in names:
        with Hosts(2) as hosts, Driver() as driver:
            team = start(driver, hosts, name)
            team.order({"seed": 0, "epochs": 1})
            shape(hosts)
            before = bytes_sent(hosts)
            found[name] = [
                team.order({"seed": seed, "epochs": epochs})[0] for seed in range(seeds)
            ]
            sent = (bytes_sent(hosts) - before) / seeds
        losses = [each["loss"] for each in found[name]]
        rows.append(
            [
                name,
                f"{statistics.mean(losses):.3f}",
                f"{min(losses):.3f} to {max(losses):.3f}",
                f"{statistics.mean(e['accuracy'] for e in found[name]):.3f}",
                f"{sent / 1e6:.1f}",
                f"{statistics.mean(e['seconds'] for e in found[name]):.0f}",
            ]
        )
    report.data.update(found=found, rows=rows)
    heads = ["", "test loss", "of the seeds", "accuracy", "MB sent", "seconds"]
    report.add(table(heads, rows))
    report.write()


if __name__ == "__main__":
    main()
