"""Does `tune=True` find the buckets that a search of all sizes finds?

    make bench-tuning     # as root: it makes hosts out of network namespaces

Two workers on two hosts, each bound to one core, train three models of `benchmarks/fit`
over links of three speeds. For each, a job with `tune=True` takes 24 steps. Then
another job takes steps with each size of buckets, in turns, and with the one that was
found. Sizes that make the same buckets are one: their steps differ by chance only.
"""

from __future__ import annotations

import sys
import tempfile
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
MODELS = ("mlp", "deep", "convnet")
# Bits per second, and steps in a round.
LINKS = {
    "300 Mbit/s": (300_000_000, 2),
    "1 Gbit/s": (1_000_000_000, 6),
    "10 Gbit/s": (10_000_000_000, 8),
}
SIZES = [int(mb * 1e6) for mb in (0.5, 1, 2, 4, 8, 16, 25, 1000)]
STEPS = 24


def tuned(hosts: Any, model: str) -> int:
    """Return the size of buckets that a job finds which tunes itself."""
    with Driver() as driver, tempfile.TemporaryDirectory() as folder:
        env = {"RING_OPTIONS": '{"tune": true}', "KERASDIST_CHECKPOINT_DIR": folder}
        command = [PLAYER, "ring", model, driver.path]
        team = start_on_hosts(driver, hosts, "tuned", command, env)
        return int(team.order({"steps": STEPS})[0]["bucket_size"])


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--links", nargs="+", default=list(LINKS), choices=LINKS)
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    models = MODELS[1:2] if options.quick else options.models
    links = ["10 Gbit/s"] if options.quick else options.links
    sizes = SIZES[3:5] if options.quick else SIZES
    report = Report(
        "A step with the buckets of `tune=True`, beside all other sizes",
        options.output,
        repeats=f"{rounds} rounds",
    )
    rows = []
    for model in models:
        with make_hosts() as hosts:
            found = {}
            for link in links:
                shape(hosts, LINKS[link][0])
                found[link] = tuned(hosts, model)
            with Driver() as driver:
                command = [PLAYER, "ring", model, driver.path]
                team = start_on_hosts(driver, hosts, model, command, {}, 1)
                for link in links:
                    rate, steps = LINKS[link]
                    shape(hosts, rate)
                    seconds: dict[int, list[float]] = {}
                    buckets: dict[int, str] = {}
                    for _ in range(rounds):
                        for size in sorted({*sizes, found[link], 25_000_000}):
                            order = {"steps": steps, "bucket_size": size}
                            answers = team.order(order)
                            taken = max(answer["seconds"] for answer in answers)
                            seconds.setdefault(size, []).append(taken)
                            buckets[size] = str(answers[0]["buckets"])
                    alike: dict[str, list[float]] = {}
                    for size, each in seconds.items():
                        alike.setdefault(buckets[size], []).extend(each)
                    medians = {size: median(alike[buckets[size]]) for size in seconds}
                    best = min(medians, key=lambda size: medians[size])
                    mine, given = medians[found[link]], medians[25_000_000]
                    report.data[f"{model}, {link}"] = seconds
                    rows.append(
                        [
                            f"{model}, {link}",
                            str(len(alike)),
                            f"{given * 1e3:.1f}",
                            f"{best / 1e6:g}: {medians[best] * 1e3:.1f}",
                            f"{found[link] / 1e6:g}: {mine * 1e3:.1f}",
                            f"{mine / medians[best]:.2f}",
                        ]
                    )
    report.data["rows"] = rows
    heads = ["", "divisions", "25 MB: ms"]
    heads += ["best MB: ms", "found MB: ms", "found / best"]
    report.add(table(heads, rows))
    report.write()


if __name__ == "__main__":
    main()
