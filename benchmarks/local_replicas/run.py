"""What several replicas in one process cost: an epoch's begin, and a step.

    make bench-local-replicas

One process trains a small model on two logical CPU devices, in epochs of 10 steps and
in some of 500, with RingStrategy and with TensorFlow's MirroredStrategy; and on one
device without a strategy. An epoch's rest is what it costs beyond its steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import Report, arguments, median, quiet_env, table

ROUNDS = 3
COLUMNS = {
    "plain Keras, one device": "plain",
    "RingStrategy, two devices": "ring",
    "MirroredStrategy, two devices": "mirrored",
}


def measure(kind: str) -> dict[str, Any]:
    """Return the seconds of epochs of 10 steps, and of a step of a long epoch."""
    done = subprocess.run(
        [sys.executable, str(HERE / "player.py"), kind],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=quiet_env(None),
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.rpartition("RESULT ")[2])
    return found


def main() -> None:
    options = arguments(__doc__, HERE).parse_args()
    report = Report("Several replicas in one process", options.output)
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in COLUMNS}
    for _ in range(1 if options.quick else ROUNDS):
        for name, kind in COLUMNS.items():
            samples[name].append(measure(kind))
            print(name, samples[name][-1], flush=True)
    report.data["samples"] = samples
    rows = []
    for name, found in samples.items():
        step = median([each["step"] for each in found])
        short = median([median(each["epochs"]) for each in found])
        rest = (short - 10 * step) * 1e3
        rows.append([name, f"{short * 1e3:.1f}", f"{step * 1e3:.2f}", f"{rest:.1f}"])
    heads = ["strategy", "epoch of 10 steps, ms", "ms per step", "epoch's rest, ms"]
    report.add("Medians:\n\n" + table(heads, rows))
    report.write()


if __name__ == "__main__":
    main()
