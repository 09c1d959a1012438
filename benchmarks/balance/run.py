"""How near does `balance="measured"` come to the sum of the workers' speeds?

    make bench-balance

1. Three workers of speeds 1, 2 and 4, which sleep for each row.
2. The same by shares of cores: one has a core, the others share one with a busy
   process, by their priorities.
3. Two equal workers: what measuring costs, and steps of any number of rows.

The ideal is all rows by the sum of the speeds: of 1. what is slept, of 2. the rows that
the same workers train on in a second, each by itself and all at the same time.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import (
    Driver,
    Report,
    Team,
    arguments,
    cluster_env,
    free_ports,
    quiet_env,
    table,
)

PLAYER = str(HERE / "player.py")
SLEEP = 0.0025  # seconds for a row of the slowest worker
CASES: dict[str, dict[str, Any]] = {
    "sleeping 4, 2, 1": {
        "sleeps": [SLEEP, SLEEP / 2, SLEEP / 4],
        "cores": [0, 0, 1],
        "nice": [0, 0, 0],
    },
    "shares of cores 1, 2, 4": {
        "sleeps": [],
        "cores": [0, 0, 1],
        # Three steps of priority are a factor of two.
        "nice": [3, 0, 0],
        "speeds": [1, 2, 4],
    },
    "two equal ones": {"sleeps": [], "cores": [0, 1], "nice": [0, 0]},
}
BUSY = "import os; os.nice(3); os.sched_setaffinity(0, {%d})\nwhile True: pass"


def start(driver: Driver, name: str, case: dict[str, Any]) -> Team:
    size = len(case["cores"])
    addresses = [f"127.0.0.1:{port}" for port in free_ports(size)]
    secret = secrets.token_hex(32)
    return driver.start(
        name,
        lambda rank: [sys.executable, PLAYER, driver.path, str(rank)],
        size,
        lambda rank: {
            **quiet_env(),
            **(cluster_env(addresses, rank, secret) if size > 1 else {}),
            "BALANCE_CASE": json.dumps(case),
            "OMP_NUM_THREADS": "1",
            "TF_NUM_INTRAOP_THREADS": "1",
        },
    )


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2240, help="of a step")
    options = parser.parse_args()
    rounds, steps, batch = options.rounds, options.steps, options.rows
    if options.quick:
        rounds, batch = 1, 280
    report = Report(
        f"Epochs of {steps} steps of {batch:,} rows, medians of {3 * rounds} epochs",
        options.output,
        repeats=f"{rounds} turns",
    )
    found: dict[str, dict[str, list[float]]] = {}
    rows = 0
    for name, case in CASES.items():
        case |= {"steps": steps, "batch": batch}
        core = sorted(os.sched_getaffinity(0))[0]
        busy = None
        if name.startswith("shares"):
            busy = subprocess.Popen([sys.executable, "-c", BUSY % core])
        try:
            with Driver() as driver:
                team = start(driver, name, case)
                kinds = ["", "measured"]
                kinds += ["independent"] if "speeds" in case else []
                for kind in kinds:  # traces, and finds the shares
                    team.order({"balance": kind, "epochs": 4})
                found[name] = {kind: [] for kind in kinds}
                for _ in range(rounds):
                    for kind in kinds:
                        answers = team.order({"balance": kind, "epochs": 3})
                        if kind != "independent":
                            found[name][kind] += answers[0]["seconds"]
                            rows = answers[0]["rows"]
                            continue
                        speeds = [
                            answer["rows"] / statistics.median(answer["seconds"])
                            for answer in answers
                        ]
                        found[name][kind].append(sum(speeds))
        finally:
            if busy is not None:
                busy.kill()
                busy.wait()
    medians = {
        name: {kind: statistics.median(each) for kind, each in kinds.items()}
        for name, kinds in found.items()
    }
    together = medians["shares of cores 1, 2, 4"]["independent"]
    ideals = {
        "sleeping 4, 2, 1": rows / (7 / SLEEP),
        "shares of cores 1, 2, 4": rows / together,
        "two equal ones": medians["two equal ones"][""],
    }
    lines = []
    for name, ideal in ideals.items():
        plain, balanced = medians[name][""], medians[name]["measured"]
        lines.append(
            [
                name,
                f"{plain:.3f}",
                f"{balanced:.3f}",
                f"{ideal:.3f}",
                f"{balanced / ideal:.3f}",
            ]
        )
    report.data.update(found=found, rows=lines)
    heads = ["", "equal rows", "by speed", "ideal", "by speed / ideal"]
    report.add(table(heads, lines))
    report.add(f"Three that share cores, each by itself: {together:.0f} rows/s.")
    report.write()


if __name__ == "__main__":
    main()
