"""Do gradients travel while the rest of the backward pass runs?

    make bench-overlap     # as root: it makes hosts out of network namespaces

Two workers on two hosts, each bound to one core, train the MLP of `benchmarks/fit` over
a wire that is shaped to 2 Gbit/s. The processor is idle while the wire carries
bytes: a bucket that leaves early costs less than its time on the wire. With one bucket
for all gradients nothing can overlap; smaller ones leave in reverse layer order. Then
one step with small buckets is drawn, from TensorFlow's own profiler.
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
    arguments,
    make_hosts,
    median,
    shape,
    start_on_hosts,
    table,
)

PLAYER = str(HERE.parent / "fit" / "player.py")
RATE = 2_000_000_000  # bits per second
GRADIENT_BYTES = 4 * (784 * 1024 + 3 * 1024 * 1024 + 4 * 1024 + 1024 * 10 + 10)
COLUMNS: dict[str, dict[str, Any]] = {
    "one bucket": {"bucket_size": 100_000_000},
    "buckets of 8 MB": {"bucket_size": 8_000_000},
    "buckets of 4 MB": {"bucket_size": 4_000_000},
    "one bucket, bf16": {"bucket_size": 100_000_000, "compression": "bf16"},
    "buckets of 4 MB, bf16": {"bucket_size": 4_000_000, "compression": "bf16"},
}
WIDTH = 72  # of the drawing, in characters


def drawn(events: list[tuple[str, float, float]]) -> str:
    """Draw what ran when: a line for what is computed, one for what is sent."""
    if not events:
        return "nothing was recorded\n"
    first, last = min(e[1] for e in events), max(e[2] for e in events)
    lanes = {"backward pass": "=", "all-reduce": "#", "forward pass": "-"}
    text = []
    for lane, mark in lanes.items():
        row = [" "] * WIDTH
        for name, begin, end in events:
            if name == lane:
                left = int((begin - first) / (last - first) * (WIDTH - 1))
                right = int((end - first) / (last - first) * (WIDTH - 1))
                row[left : right + 1] = mark * (right + 1 - left)
        text.append(f"    {lane:>14} |{''.join(row)}|")
    text.append(f"    {'ms':>14}  0{last - first:>{WIDTH - 1}.0f}")
    return "\n".join(text) + "\n"


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    rounds, steps = (1, 2) if options.quick else (options.rounds, 8)
    names = ["buckets of 4 MB"] if options.quick else list(COLUMNS)
    report = Report(
        f"A step of the MLP over a wire of {RATE / 1e9:g} Gbit/s",
        options.output,
        repeats=f"{rounds} rounds x {steps} steps",
    )
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with make_hosts() as hosts, Driver() as driver:
        shape(hosts, RATE)
        command = [PLAYER, "ring", "mlp", driver.path]
        teams = {
            name: start_on_hosts(
                *(driver, hosts, name, command),
                {"RING_OPTIONS": json.dumps(COLUMNS[name])},
                place,
            )
            for place, name in enumerate(names)
        }
        alone = driver.start(
            "one worker",
            lambda rank: [sys.executable, PLAYER, "ring", "mlp", driver.path, "0", "1"],
            1,
        )
        for team in (*teams.values(), alone):
            team.order({"steps": 2})
        seconds["one worker: nothing is sent"] = []
        for _ in range(rounds):
            for name, team in {**teams, "one worker: nothing is sent": alone}.items():
                answers = team.order({"steps": steps})
                seconds[name].append(max(a["seconds"] for a in answers))
        trace = teams["buckets of 4 MB"].order({"trace": True})[0]
    report.data.update(seconds=seconds, trace=trace)
    compute = median(seconds["one worker: nothing is sent"])
    rows = []
    for name, samples in seconds.items():
        sent = GRADIENT_BYTES if name in COLUMNS else 0
        if "bf16" in name:
            sent //= 2
        wire = sent * 8 / RATE  # 2 (N-1)/N x bytes, N=2
        step = median(samples)
        base = "one bucket, bf16" if "bf16" in name else "one bucket"
        gain = median(
            a - b for a, b in zip(seconds.get(base, samples), samples, strict=True)
        )
        rows.append(
            [
                name,
                f"{step * 1e3:.1f}",
                f"{wire * 1e3:.1f}",
                f"{(compute + wire) * 1e3:.1f}",
                f"{gain * 1e3:.1f}" if sent and name != base else "-",
            ]
        )
    report.data["rows"] = rows
    report.add(
        table(
            [
                "",
                "ms per step",
                "least ms on the wire",
                "wire after compute",
                "ms less than one bucket",
            ],
            rows,
        )
    )
    report.add("One step with buckets of 4 MB, rank 0, by TensorFlow's profiler:\n")
    report.add(drawn([tuple(event) for event in trace]))
    report.write()


if __name__ == "__main__":
    main()
