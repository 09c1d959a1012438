"""What does less on the wire save on links of three speeds?

    make bench-compression     # as root: it makes hosts out of network namespaces

Two workers on two hosts, each bound to one core, train three models of
`benchmarks/fit`. The link is shaped to 100 Mbit/s, 1 and 10 Gbit/s. Bytes are those
that host 0 has sent in a step, by the counter of its interface, and what the compressor
counts, where that doesn't depend on rows. torch's `PowerSGDState` does the same for the
MLP.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import (
    ROOT,
    Driver,
    Report,
    Team,
    arguments,
    bytes_sent,
    make_hosts,
    median,
    plot,
    shape,
    start_on_hosts,
    table,
)

PLAYER = str(HERE.parent / "fit" / "player.py")
TORCH_PLAYER = str(HERE / "torch_player.py")
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
MODELS = ["mlp", "convnet", "lstm"]
# The same MLP in torch, with the kinds of `torch_player`.
TORCH = {"torch, whole": "whole", "torch, powersgd, rank 2": "powersgd"}


def measure(model: str, names: list[str], links: list[str], options: Any) -> Any:
    """Measure a model's columns; return bytes by the interface and ours, and seconds.

    The columns take turns on each link.
    """
    rounds = 1 if options.quick else options.rounds
    seconds: dict[str, dict[str, list[float]]] = {link: {} for link in links}
    sent: dict[str, float] = {}
    counted: dict[str, float] = {}
    with make_hosts() as hosts, Driver() as driver:
        shape(hosts, LINKS["10 Gbit/s"][0])
        command = [PLAYER, "ring", model, driver.path]
        teams = {
            name: start_on_hosts(
                *(driver, hosts, name, command),
                {"RING_OPTIONS": json.dumps(COLUMNS[name])},
                place,
            )
            for place, name in enumerate(names)
        }
        peers = TORCH if options.torch and model == "mlp" else {}
        for place, (name, kind) in enumerate(peers.items()):
            teams[name] = start_on_hosts(
                *(driver, hosts, name, [TORCH_PLAYER, driver.path, kind], {}),
                *(len(names) + place, options.torch),
            )
        for name, team in teams.items():
            counted[name] = team.order({"steps": 4})[0].get("bytes") or 0
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
    return sent, counted, seconds


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--torch", help="the Python of an environment with torch")
    options = parser.parse_args()
    models = ["mlp"] if options.quick else MODELS
    names = ["factors"] if options.quick else list(COLUMNS)
    links = ["10 Gbit/s"] if options.quick else list(LINKS)
    report = Report(
        "A step of three models with two workers, by what is sent",
        options.output,
        repeats=f"{options.rounds} rounds",
    )
    for model in models:
        sent, counted, seconds = measure(model, names, links, options)
        medians = {
            name: [median(seconds[link][name]) * 1e3 for link in links] for name in sent
        }
        rows = [
            [
                name,
                f"{sent[name] / 1e6:.2f}",
                f"{counted[name] / 1e6:.2f}" if counted[name] else "",
                *(f"{each:.0f}" for each in medians[name]),
            ]
            for name in sent
        ]
        report.data[model] = {
            "seconds": seconds,
            "sent": sent,
            "counted": counted,
            "rows": rows,
        }
        heads = [f"ms at {link}" for link in links]
        report.add(table([model, "MB sent", "counted", *heads], rows))
        if not options.quick:
            rates = [LINKS[link][0] / 1e6 for link in links]
            lines = {
                name: list(zip(rates, each, strict=True))
                for name, each in medians.items()
            }
            path = report.folder / f"{model}.svg"
            if model == "mlp" and report.folder == HERE:
                path = ROOT / "docs" / "images" / "compression.svg"
            plot(path, lines, "Mbit/s", "ms per step")
    report.write()


def _sent_in(hosts: Any, team: Team, steps: int) -> int:
    before = bytes_sent(hosts)
    team.order({"steps": steps})
    return bytes_sent(hosts) - before


if __name__ == "__main__":
    main()
