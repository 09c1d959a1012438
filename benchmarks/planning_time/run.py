"""How long a plan takes for a model of 200 layers.

    make bench-planning-time

Two models of 200 layers, a chain of Dense and one with convolutions, normalizations and
skips, are planned for four devices, ten times each in one process. A plan builds the
model, calls and differentiates it, and cuts it; at most 2 s are to be reached.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import Report, arguments, median, quiet_env, table

_MOST_SECONDS = 2.0


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=200)
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.layers = 1, 20
    report = Report(
        f"Planning a model of {options.layers} layers",
        options.output,
        repeats=str(options.repeats),
    )
    done = subprocess.run(
        [
            *(sys.executable, str(HERE / "player.py")),
            *(str(options.layers), str(options.repeats)),
        ],
        env=quiet_env(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        sys.exit(f"The player failed:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.partition("RESULT ")[2])
    report.data["seconds"] = found
    rows = []
    for name, (first, *others) in found.items():
        middle = median(others or [first])
        verdict = "reached" if middle <= _MOST_SECONDS else "MISSED"
        rows.append((name, f"{first:.2f}", f"{middle:.2f}", f"at most 2 s: {verdict}"))
    report.add(table(["model", "first plan, s", "median of the others, s", ""], rows))
    report.write()


if __name__ == "__main__":
    main()
