"""What `ScalingTensorBoard` costs: a step with it and without it.

    make bench-board-cost

Two workers train two copies of one model in turns, an epoch with the callback and one
without it, in the same processes. A sample is the mean step of an epoch, with all that
the callback does in it: the clocks in the step's graph, what workers tell each other
after each window, and writing.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import Report, arguments, median, table

WORKERS = 2
# Title, width of the three hidden layers, and rows of a global batch.
MODELS = (
    ("4.1 million parameters", 1000, 256),
    ("0.6 million parameters", 300, 128),
    ("0.1 million parameters", 100, 64),
)


def measure(width: int, batch: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Samples by column, in seconds: of the slower worker each."""
    numbers = [str(number) for number in (rounds, steps, width, batch)]
    command = [sys.executable, "-m", "kerasdist", "run", "-n", str(WORKERS)]
    done = subprocess.run(
        [*command, "--output", "all", str(HERE / "player.py"), *numbers],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    found = [
        json.loads(line.partition("RESULT ")[2])["samples"]
        for line in done.stdout.splitlines()
        if "RESULT " in line
    ]
    return {
        name: [max(pair) for pair in zip(*(one[name] for one in found), strict=True)]
        for name in ("without", "with")
    }


def main() -> None:
    parser = arguments(__doc__, HERE)
    options = parser.parse_args()
    models = MODELS[2:] if options.quick else MODELS
    rounds, steps = (2, 30) if options.quick else (12, 100)
    report = Report("What ScalingTensorBoard costs", options.output)
    report.data["samples"] = {}
    rows = []
    for title, width, batch in models:
        samples = measure(width, batch, rounds, steps)
        report.data["samples"][title] = samples
        without, board = median(samples["without"]), median(samples["with"])
        ratios = [
            b / a - 1 for a, b in zip(samples["without"], samples["with"], strict=True)
        ]
        quarters = statistics.quantiles(ratios, n=4)
        rows.append(
            [
                title,
                str(batch),
                f"{without * 1e3:.3f}",
                f"{board * 1e3:.3f}",
                f"{median(ratios):+.1%}",
                f"{quarters[0]:+.1%} to {quarters[2]:+.1%}",
            ]
        )
    report.data["rows"] = rows
    heads = ["model", "batch", "without, ms", "with, ms", "more", "quartiles"]
    report.add(table(heads, rows))
    report.write()


if __name__ == "__main__":
    main()
