"""How far are predictions off?

    make bench-prediction     # as root: it makes hosts out of network namespaces

Workers on hosts of their own sleep where others compute, and all-reduce the gradients
of three models over links of two speeds, by the ring of kerasdist. One worker gives the
times of computing, two the link. From these the step of 3, 4, 8 and 16 workers is
predicted, and compared with what they take.
"""

from __future__ import annotations

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
from kerasdist.collectives.fused_buffer import in_buckets
from kerasdist.prediction.profile import HostLink, Profile, all_reduces_of
from kerasdist.prediction.simulation import Setup, predict

PLAYER = str(HERE / "player.py")
# Numbers of each variable, from the first layer to the last.
SHAPES = {
    "MLP": [784 * 1024, 1024, 1024 * 1024, 1024, 1024 * 1024, 1024, 10 * 1024, 10],
    "convolutional net": [
        number
        for size, count in ((32, 3), (64, 4), (128, 4), (256, 2))
        for number in (9 * size * size, size) * count
    ],
    "transformer": [
        4000 * 128,
        *(n for _ in range(4) for n in (*[128 * 128] * 4, 128 * 512, 512 * 128)),
    ],
}
# Bits per second, and the mean seconds of computing a step. So slow that the cores,
# which 16 hosts share, aren't the limit.
LINKS = {"25 Mbit/s": (25_000_000, 1.0), "50 Mbit/s": (50_000_000, 0.5)}
WORKERS = (3, 4, 8, 16)
SPREAD = 0.1
BUCKET = 1_000_000


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    links = ["50 Mbit/s"] if options.quick else list(LINKS)
    models = ["MLP"] if options.quick else list(SHAPES)
    workers = (2,) if options.quick else (1, 2, *WORKERS)
    steps = 3 if options.quick else options.steps
    report = Report(
        "Steps as predicted from one and two workers, and as measured",
        options.output,
        ("numpy",),
        repeats=f"{steps} steps",
    )
    measured: dict[tuple[str, str, int], Any] = {}
    link_of: dict[str, HostLink] = {}
    buckets = {}
    for model in models:
        sizes = [4 * number for number in SHAPES[model]]
        buckets[model] = [
            sum(sizes[i] for i in bucket) for bucket in in_buckets(sizes, BUCKET)
        ]
    for count in workers:
        with make_hosts(count) as hosts, Driver() as driver:
            team = start_on_hosts(driver, hosts, "workers", [PLAYER, driver.path], {})
            for link in links:
                rate, compute = LINKS[link]
                shape(hosts, rate)
                if count == 2:
                    link_of[link] = HostLink(*team.order({"link": True})[0])
                for model in models:
                    order = {
                        "compute": compute,
                        "spread": SPREAD,
                        "buckets": buckets[model],
                    }
                    team.order({"steps": 2, **order})
                    # One worker's times are those of all: more of them.
                    several = 10 * steps if count == 1 else steps
                    measured[link, model, count] = team.order(
                        {"steps": several, **order}
                    )[0]
    rows, errors = [], []
    for link in links:
        for model in models:
            alone = measured[link, model, min(workers)]
            profile = Profile(
                rows=1,
                compute=tuple(alone["compute"]),
                messages=all_reduces_of(buckets[model]),
            )
            for count in workers[-len(WORKERS) :]:
                found = predict(profile, Setup(link=link_of[link]), count)
                seconds = measured[link, model, count]["seconds"]
                error = found.step_s / seconds - 1
                errors.append(abs(error))
                rows.append(
                    [
                        f"{model}, {link}",
                        str(count),
                        f"{seconds * 1e3:.0f}",
                        f"{found.step_s * 1e3:.0f}",
                        f"{error:+.1%}",
                        found.limit,
                    ]
                )
    heads = ["model, link", "workers", "ms measured", "ms predicted", "error", "limit"]
    report.add(table(heads, rows))
    if not options.quick:
        worst = sorted(errors)[int(0.9 * len(errors))]
        report.add(
            f"Median error {median(errors):.1%}; 9 of 10 at most {worst:.1%}. Links: "
            + "; ".join(
                f"{name}: {link.latency * 1e6:.0f} us, {link.byte * 1e9:.2f} ns a byte"
                for name, link in link_of.items()
            )
        )
    report.data["rows"] = rows
    report.data["links"] = link_of
    report.write()


if __name__ == "__main__":
    main()
