"""What `ScalingTensorBoard` costs: a step with it and without it.

    make bench-board-cost

Workers train one model in one `fit`, blocks of some steps with the callback and blocks
without it, by chance in turns; that in several processes, as two graphs of the same
step differ by a percent. What the end of a window takes is told apart. Both together
are what the callback costs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import Report, arguments, table

# Title, workers, devices of each worker that have stages of the model, width of
# the three hidden layers, rows of a global batch.
RUNS, ROUNDS = 3, 120
MODELS = (
    ("2.8 million parameters", 1, 1, 1000, 256),
    ("0.4 million parameters", 1, 1, 300, 128),
    ("0.1 million parameters", 1, 1, 100, 64),
    ("2.8 million parameters", 2, 1, 1000, 256),
    ("0.4 million parameters", 2, 1, 300, 128),
    ("0.1 million parameters", 2, 1, 100, 64),
    ("2.8 million, 2 stages", 1, 2, 1000, 512),
    ("0.4 million, 2 stages", 1, 2, 300, 128),
    ("15 million parameters", 1, 1, 2550, 256),
)


def measure(workers: int, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """What each worker has found, each on a core of its own."""
    arguments = [str(number) for number in numbers]
    command = [sys.executable, "-m", "kerasdist", "run", "-n", str(workers)]
    command += ["--output", "all", str(HERE / "player.py"), *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return [
        json.loads(line.partition("RESULT ")[2])
        for line in done.stdout.splitlines()
        if "RESULT " in line
    ]


def together(run: Sequence[dict[str, Any]], kind: str) -> np.ndarray:
    """How much longer steps are with the callback, as a share, in each round.

    Means over the workers, who wait for each other in each step.
    """
    without, measured = (
        np.mean([one[kind][way] for one in run], axis=0)
        for way in ("without", "measured")
    )
    return np.asarray(measured / without - 1)


def more(runs: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of the runs' medians: of each run, then drawn again and again."""
    chance = np.random.default_rng(0)
    found = [np.mean([np.median(run) for run in runs])]
    for _ in range(2000):
        drawn = [runs[i] for i in chance.integers(len(runs), size=len(runs))]
        found.append(
            np.mean(
                [
                    np.median(run[chance.integers(len(run), size=len(run))])
                    for run in drawn
                ]
            )
        )
    return np.array(found)


def main() -> None:
    parser = arguments(__doc__, HERE)
    options = parser.parse_args()
    models, count, rounds = MODELS, RUNS, ROUNDS
    if options.quick:
        models, count, rounds = MODELS[2:3], 2, 4
    report = Report("What ScalingTensorBoard costs", options.output)
    report.data["samples"] = []
    rows = []
    for title, workers, *numbers in models:
        found = [measure(workers, [rounds, *numbers]) for _ in range(count)]
        report.data["samples"].append(found)
        usual = np.median(
            np.concatenate([one["samples"]["without"] for run in found for one in run])
        )
        steps = more([together(run, "samples") for run in found])
        processor = more([together(run, "processor") for run in found])
        spent = sum(run[0]["window_seconds"] for run in found)
        windows = spent / sum(run[0]["seconds"] for run in found)
        low, high = np.percentile(steps[1:] + windows, [5, 95])
        rows.append(
            [
                title,
                str(workers),
                f"{usual * 1e3:.3f}",
                f"{steps[0] + windows:+.2%}",
                f"{low:+.2%} to {high:+.2%}",
                f"{steps[0]:+.2%}",
                f"{processor[0]:+.2%}",
                f"{windows:+.2%}",
            ]
        )
        print(*rows[-1], flush=True)
    report.data["rows"] = rows
    heads = ["model", "workers", "without, ms", "with: more", "9 of 10"]
    heads += ["steps", "processor time", "ends of windows"]
    report.add(table(heads, rows))
    report.write()


if __name__ == "__main__":
    main()
