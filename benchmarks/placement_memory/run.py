"""A plan's estimate of memory beside what training really takes at most.

    make bench-placement-memory

For each model of `zoo.py` two processes: one asks `kerasdist.plan`, without weights;
one trains some steps and asks TensorFlow's allocator how many bytes it had handed out
at most at once. Estimates within 20 % are what is to be reached.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

from zoo import ZOO

from common import Report, arguments, quiet_env, table

_TOLERANCE = 0.2


def play(*words: str) -> dict[str, Any]:
    """Run the player in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(HERE / "player.py"), *words],
        env=quiet_env(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.partition("RESULT ")[2])
    return found


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--models", nargs="+", choices=list(ZOO), default=list(ZOO))
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    if options.quick:
        options.models, options.steps = ["embedding"], 2
    report = Report(
        "A plan's estimate of memory, and what training takes", options.output
    )
    rows, results = [], {}
    for name in options.models:
        estimated = play("estimate", name)
        measured = play("measure", name, str(options.steps))
        results[name] = {"estimated": estimated, "measured": measured}
        ratio = estimated["bytes"] / measured["bytes"]
        rows.append(
            (
                name,
                ZOO[name][1],
                ZOO[name][2],
                *(
                    f"{value / 1e6:.1f}"
                    for value in (
                        estimated["parameters"],
                        estimated["kept"],
                        estimated["activations"],
                        estimated["bytes"],
                        measured["bytes"],
                    )
                ),
                f"{ratio:.2f}",
                "reached" if abs(ratio - 1) <= _TOLERANCE else "MISSED",
            )
        )
    report.data["models"] = results
    head = ["model", "rows", "optimizer", "parameters, MB", "gradients + slots, MB"]
    head += ["activations, MB", "estimate, MB", "measured, MB", "ratio", "within 20 %"]
    report.add(table(head, rows))
    report.write()


if __name__ == "__main__":
    main()
