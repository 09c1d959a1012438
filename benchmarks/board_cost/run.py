"""What `ScalingTensorBoard` costs: a step with it and without it.

    make bench-board-cost

Workers train one model in one `fit`, blocks of some steps with the callback and blocks
without it, by chance in turns; that several times, as two graphs of the same step differ
by some percents, whatever is in them. A sample is the mean step of a block on the slower
one. What the end of a window takes is told apart: the gathering and the writing.
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
RUNS, ROUNDS = 5, 12
MODELS = (
    ("4.1 million parameters", 1, 1, 1000, 256),
    ("0.6 million parameters", 1, 1, 300, 128),
    ("0.1 million parameters", 1, 1, 100, 64),
    ("4.1 million parameters", 2, 1, 1000, 256),
    ("0.6 million parameters", 2, 1, 300, 128),
    ("0.1 million parameters", 2, 1, 100, 64),
    ("4.1 million, 2 stages", 1, 2, 1000, 512),
    ("0.6 million, 2 stages", 1, 2, 300, 128),
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


def more(runs: Sequence[dict[str, Any]], way: str) -> list[str]:
    """How much longer, and in which bounds that is in 9 of 10 such measurements."""
    ratios = [run[way] / run["without"] - 1 for run in runs]
    chance = np.random.default_rng(0)
    drawn = []
    for _ in range(2000):
        # Of some runs some rounds.
        some = [ratios[i] for i in chance.integers(len(ratios), size=len(ratios))]
        drawn.append(np.median([chance.choice(one, len(one)) for one in some]))
    low, high = np.percentile(drawn, [5, 95])
    return [f"{np.median(ratios):+.2%}", f"{low:+.2%} to {high:+.2%}"]


def main() -> None:
    parser = arguments(__doc__, HERE)
    options = parser.parse_args()
    models, count, rounds = MODELS, RUNS, ROUNDS
    if options.quick:
        models, count, rounds = MODELS[2:3], 1, 3
    report = Report("What ScalingTensorBoard costs", options.output)
    report.data["samples"] = []
    rows = []
    for title, workers, *numbers in models:
        found = [measure(workers, [rounds, *numbers]) for _ in range(count)]
        report.data["samples"].append(found)
        slower = [
            {
                way: np.max([one["samples"][way] for one in run], axis=0)
                for way in run[0]["samples"]
            }
            for run in found
        ]
        windows = sum(run[0]["window_seconds"] for run in found)
        rows.append(
            [
                title,
                str(workers),
                f"{np.median([run['without'] for run in slower]) * 1e3:.3f}",
                *more(slower, "with"),
                f"{windows / sum(run[0]['measured_for'] for run in found):+.2%}",
                *more(slower, "every step measured"),
            ]
        )
    report.data["rows"] = rows
    heads = ["model", "workers", "without, ms", "with: more", "9 of 10"]
    heads += ["ends of windows", "every step measured", "9 of 10"]
    report.add(table(heads, rows))
    report.write()


if __name__ == "__main__":
    main()
