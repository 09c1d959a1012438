"""What `ScalingTensorBoard` costs: a step with it and without it.

    make bench-board-cost

Workers train one model in one `fit`, blocks of some steps with the callback and blocks
without it, by chance in turns; that in several processes, as two graphs of the same
step, of which one is measured, differ by a percent. What a row of measured steps takes
and the end of a window is told apart: both come so many times in a second. All of it
together is what the callback costs.
"""

from __future__ import annotations

import json
import statistics
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
RUNS, ROUNDS = 2, 50
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


def measure(workers: int, numbers: Sequence[float]) -> list[dict[str, Any]]:
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


def together(run: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Samples by way: means over the workers, who wait for each other in each step."""
    return {
        way: np.mean([one["samples"][way] for one in run], axis=0)
        for way in run[0]["samples"]
    }


def more(
    runs: Sequence[dict[str, np.ndarray]], way: str, row_seconds: float
) -> np.ndarray:
    """How much longer steps are, as a share: of each run, drawn again and again."""
    chance = np.random.default_rng(0)

    def once(drawn: Sequence[dict[str, np.ndarray]], again: bool) -> float:
        shares = []
        for run in drawn:
            share = run[way] / run["without"] - 1
            if way == "row":
                share = run[way] / row_seconds
            count = len(share)
            shares.append(share[chance.integers(count, size=count)] if again else share)
        return float(np.mean([np.median(share) for share in shares]))

    found = [once(runs, again=False)]
    for _ in range(2000):
        some = [runs[i] for i in chance.integers(len(runs), size=len(runs))]
        found.append(once(some, again=True))
    return np.array(found)


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--workers", type=int, help="only models of so many workers")
    options = parser.parse_args()
    models, count, rounds = MODELS, RUNS, ROUNDS
    if options.workers:
        models = tuple(model for model in MODELS if model[1] == options.workers)
    if options.quick:
        models, count, rounds = MODELS[2:3], 2, 4
    report = Report("What ScalingTensorBoard costs", options.output)
    report.data["samples"] = []
    rows = []
    for title, workers, *numbers in models:
        given = [rounds, *numbers]
        found = [measure(workers, given)]
        given.append(found[0][0]["step_seconds"])
        found += [measure(workers, given) for _ in range(count - 1)]
        report.data["samples"].append(found)
        runs = [together(run) for run in found]
        usual = np.median(np.concatenate([run["without"] for run in runs]))
        row_seconds = statistics.median(one["row_seconds"] for [one, *_] in found)
        parts = {
            way: more(runs, way, row_seconds) for way in runs[0] if way != "without"
        }
        spent = sum(run[0]["window_seconds"] for run in found)
        windows = spent / sum(run[0]["seconds"] for run in found)
        whole = sum(parts.values()) + windows
        low, high = np.percentile(whole[1:], [5, 95])
        rows.append(
            [
                title,
                str(workers),
                f"{usual * 1e3:.3f}",
                f"{whole[0]:+.2%}",
                f"{low:+.2%} to {high:+.2%}",
                *(
                    f"{parts[way][0]:+.2%}" if way in parts else ""
                    for way in ("counted", "row", "measured")
                ),
                f"{windows:+.2%}",
            ]
        )
        print(*rows[-1], flush=True)
    report.data["rows"] = rows
    heads = ["model", "workers", "without, ms", "with: more", "9 of 10"]
    heads += ["counted", "rows", "every step measured", "ends of windows"]
    report.add(table(heads, rows))
    report.write()


if __name__ == "__main__":
    main()
