"""What the comparison of all variables at an epoch's end costs.

    make bench-epoch-check

Two workers, each on a core of its own, train epochs of 100 steps with Adam. At the end
of each they compare hashes of all variables. The time of that is measured by itself, as
a part of the epoch's: that of the worker which comes last, and doesn't wait.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import Report, arguments, table

RUNS, EPOCHS = 2, 5
# Title, width of the three hidden layers, rows of a global batch.
MODELS = (
    ("0.04 million parameters", 100, 64),
    ("0.2 million parameters", 300, 128),
    ("2.1 million parameters", 1000, 256),
)


def measure(*numbers: int) -> list[dict[str, Any]]:
    """Return each worker's epochs and checks."""
    command = [sys.executable, "-m", "kerasdist", "run", "-n", "2", "--output", "all"]
    command += ["--bind", "cores", str(HERE / "player.py"), *map(str, numbers)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return [
        json.loads(line.partition("RESULT ")[2])
        for line in done.stdout.splitlines()
        if "RESULT " in line
    ]


def main() -> None:
    options = arguments(__doc__, HERE).parse_args()
    models, runs, epochs = MODELS, RUNS, EPOCHS
    if options.quick:
        models, runs, epochs = MODELS[:1], 1, 2
    report = Report("What the check at an epoch's end costs", options.output)
    report.data["samples"] = []
    rows = []
    for title, width, batch in models:
        jobs = [measure(width, batch, epochs) for _ in range(runs)]
        found = [each for job in jobs for each in job]
        report.data["samples"].append(found)
        whole = np.concatenate([each["epochs"] for each in found])
        # The worker that comes last doesn't wait for the other one.
        checks = np.concatenate(
            [np.min([each["checks"] for each in job], axis=0) for job in jobs]
        )
        rows.append(
            [
                title,
                f"{found[0]['bytes'] / 1e6:.1f}",
                f"{np.median(whole):.3f}",
                f"{np.median(checks) * 1e3:.2f}",
                f"{np.median(checks) / np.median(whole):.2%}",
            ]
        )
        print(*rows[-1], flush=True)
    report.data["rows"] = rows
    heads = ["model", "state, MB", "epoch, s", "check, ms", "part of the epoch"]
    report.add(table(heads, rows))
    report.write()


if __name__ == "__main__":
    main()
