"""Do two sites on a slow line learn what two machines beside each other learn?

    make bench-local-steps     # as root: it makes hosts out of network namespaces

Two workers on two hosts, whose link is shaped to 10 Mbit/s, train three models, with
whole gradients, compressed ones, local steps, DiLoCo: that of `examples/digits.py` (20
epochs of 22 steps), and for generated data a ResNet-8 and an LSTM of 256 units (8
epochs of 16 steps). Losses are those of rows that weren't trained on.

    make bench-local-steps BENCH_ARGS="--delay 50"

lets each frame arrive 50 ms later, in both directions, and trains the digits alone,
with whole gradients and averages of weights.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import (
    Driver,
    Report,
    arguments,
    bytes_sent,
    delayed,
    make_hosts,
    plot,
    shape,
    start_on_hosts,
    table,
)

PLAYER = str(HERE / "player.py")
# Epochs of each, and the steps of one.
MODELS = {"digits": (12, 22), "resnet8": (6, 16), "lstm": (4, 16)}
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
        "rate": 1 / 7,
    },
}


def draw(
    folder: Path, model: str, found: dict[str, list[dict[str, list[float]]]]
) -> None:
    """Draw the mean loss of all seeds after each epoch, against seconds and steps."""
    seconds, steps = {}, {}
    for name, each in found.items():
        losses, times = (
            [
                statistics.mean(values)
                for values in zip(*(run[key] for run in each), strict=True)
            ]
            for key in ("loss", "seconds")
        )
        seconds[name] = list(zip(times, losses, strict=True))
        by_epoch = range(MODELS[model][1], 1 << 30, MODELS[model][1])
        steps[name] = list(zip(by_epoch, losses, strict=False))
    plot(folder / f"{model}.svg", seconds, "seconds of training", "test loss")
    plot(folder / f"{model}_steps.svg", steps, "steps", "test loss")


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds")
    options = parser.parse_args()
    if options.delay and options.output == HERE:
        options.output = HERE / "delayed"
    models = ["digits"] if options.delay else list(MODELS)
    seeds = 1 if options.quick else options.seeds
    names = ["local_steps=11"] if options.quick else list(COLUMNS)
    if options.delay:
        names = ["whole gradients", "local_steps=4", "local_steps=11"]
    report = Report(
        f"Training with two workers over {RATE / 1e6:g} Mbit/s, "
        f"{2 * options.delay:g} ms there and back",
        options.output,
        repeats=f"{seeds} seeds",
    )
    for model in models:
        epochs = 1 if options.quick else MODELS[model][0]
        rows = []
        for name in names:
            with (
                make_hosts() as hosts,
                contextlib.ExitStack() as line,
                Driver() as driver,
            ):
                team = start_on_hosts(
                    *(driver, hosts, name, [PLAYER, driver.path]),
                    {"RING_OPTIONS": json.dumps(COLUMNS[name]), "MODEL": model},
                )
                team.order({"seed": 0, "epochs": 1})
                shape(hosts, RATE)
                if options.delay:
                    line.enter_context(delayed(hosts, options.delay / 1e3))
                before = bytes_sent(hosts)
                orders = [{"seed": seed, "epochs": epochs} for seed in range(seeds)]
                found = [team.order(order)[0] for order in orders]
                sent = (bytes_sent(hosts) - before) / seeds
            report.data[f"{model}, {name}"] = found
            losses = [each["loss"][-1] for each in found]
            rows.append(
                [
                    name,
                    f"{statistics.mean(losses):.3f}",
                    f"{min(losses):.3f} to {max(losses):.3f}",
                    f"{statistics.mean(e['accuracy'][-1] for e in found):.3f}",
                    f"{sent / 1e6:.1f}",
                    f"{statistics.mean(e['seconds'][-1] for e in found):.0f}",
                ]
            )
        heads = [model, "test loss", "of the seeds", "accuracy", "MB sent", "seconds"]
        report.data[f"{model}, rows"] = rows
        report.add(table(heads, rows))
        if not options.quick:
            draw(report.folder, model, {n: report.data[f"{model}, {n}"] for n in names})
    report.write()


if __name__ == "__main__":
    main()
