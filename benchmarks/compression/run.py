"""What does less on the wire save on links of three speeds?

    make bench-compression     # as root: it makes hosts out of network namespaces

Two workers on two hosts, each bound to one core, train the MLP of `benchmarks/fit`: 16
MB of gradients. The link is shaped to 100 Mbit/s, 1 and 10 Gbit/s. Bytes are those that
host 0 has sent, by the counter of its interface.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import (
    Driver,
    Report,
    Team,
    arguments,
    bytes_sent,
    median,
    shape,
    start_on_hosts,
    table,
    two_hosts,
)

PLAYER = str(HERE.parent / "fit" / "player.py")
# Bits per second, and steps in a round: a step takes a second on the slow link.
LINKS = {
    "100 Mbit/s": (100_000_000, 4),
    "1 Gbit/s": (1_000_000_000, 8),
    "10 Gbit/s": (10_000_000_000, 16),
}
COLUMNS: dict[str, dict[str, Any]] = {
    "whole gradients": {},
    "bf16": {"compression": "bf16"},
    "factors": {"compression": "factors"},
    "powersgd, rank 2": {"compression": "powersgd"},
    "topk, 0.001": {"compression": "topk"},
    "local_steps=4": {"local_steps": 4},
}


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    names = ["factors"] if options.quick else list(COLUMNS)
    links = ["10 Gbit/s"] if options.quick else list(LINKS)
    report = Report(
        "A step of the MLP of 16 MB with two workers, by what is sent",
        options.output,
        repeats=f"{rounds} rounds",
    )
    seconds: dict[str, dict[str, list[float]]] = {link: {} for link in links}
    sent: dict[str, float] = {}
    with two_hosts() as hosts, Driver() as driver:
        shape(hosts, LINKS["10 Gbit/s"][0])
        command = [PLAYER, "ring", "mlp", driver.path]
        teams = {
            name: start_on_hosts(
                *(driver, hosts, name, command),
                {"RING_OPTIONS": json.dumps(COLUMNS[name])},
                place,
            )
            for place, name in enumerate(names)
        }
        for name, team in teams.items():
            team.order({"steps": 4})
            # All steps of a call, with those of its beginning: the rest is left out.
            short, long = (
                _sent_in(hosts, team, steps)
                for steps in ((4, 8) if options.quick else (4, 20))
            )
            sent[name] = (long - short) / (4 if options.quick else 16)
        for link in links:
            rate, steps = LINKS[link]
            shape(hosts, rate)
            steps = 4 if options.quick else steps
            for _ in range(rounds):
                for name, team in teams.items():
                    answers = team.order({"steps": steps})
                    found = max(answer["seconds"] for answer in answers)
                    seconds[link].setdefault(name, []).append(found)
    report.data.update(seconds=seconds, sent=sent)
    rows = [
        [
            name,
            f"{sent[name] / 1e6:.2f}",
            *(f"{median(seconds[link][name]) * 1e3:.0f}" for link in links),
        ]
        for name in names
    ]
    report.data["rows"] = rows
    heads = [f"ms at {link}" for link in links]
    report.add(table(["", "MB sent per step", *heads], rows))
    report.write()


def _sent_in(hosts: Any, team: Team, steps: int) -> int:
    before = bytes_sent(hosts)
    team.order({"steps": steps})
    return bytes_sent(hosts) - before


if __name__ == "__main__":
    main()
