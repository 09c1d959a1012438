"""The time that heartbeats take the chief of a job of many ranks, and their bytes.

    make bench-heartbeats
    python benchmarks/heartbeats/run.py --library ../before    # of another checkout

The chief is the library's failure detector in a process of its own, with a connection
over TCP to each other rank, and the default interval between heartbeats. Its time is
that of the whole process, in user mode and in the kernel.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import ROOT, Report, arguments, quiet_env, table

RANKS = (10, 100, 1000)
JOBS = {
    "training": "all ranks are in another collective every 0.1 s",
    "slow steps": "all ranks are in another collective every 20 s",
    "waiting": "all ranks but one wait for that one",
}
# The default of `Timeouts`.
INTERVAL = 6.0
# Intervals before the first figure, in which connections are made.
WARM = 2
# The share of a core that must not be exceeded.
MOST = 0.05


def player(library: Path, *words: object) -> subprocess.Popen[str]:
    """Start one side of the connections."""
    return subprocess.Popen(
        [sys.executable, str(HERE / "player.py"), *map(str, words)],
        env={**quiet_env(), "PYTHONPATH": str(library)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def figures(sides: list[subprocess.Popen[str]]) -> dict[str, float]:
    """Return the figures of both sides so far, and the time."""
    found = {"seconds": time.monotonic()}
    for side in sides:
        side.stdin.write("\n")
        side.stdin.flush()
        found |= json.loads(side.stdout.readline())
    return found


def measure(library: Path, ranks: int, job: str, intervals: int) -> dict[str, float]:
    """Return what a job of `ranks` ranks used in `intervals` intervals."""
    chief = player(library, "chief", ranks, job)
    sides = [chief]
    try:
        port = chief.stdout.readline().strip()
        sides.append(player(library, "ranks", ranks, job, port))
        time.sleep(WARM * INTERVAL)
        before = figures(sides)
        time.sleep(intervals * INTERVAL)
        after = figures(sides)
    finally:
        for side in sides:
            side.kill()
        for side in sides:
            side.communicate()
    return {name: after[name] - before[name] for name in after}


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--library", type=Path, default=ROOT, help="a checkout")
    parser.add_argument("--intervals", type=int, default=3, help="per figure")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    options = parser.parse_args()
    sizes, jobs, intervals = options.ranks, list(JOBS), options.intervals
    if options.quick:
        sizes, jobs, intervals = [100], jobs[:1], 1
    notes = {}
    if options.library != ROOT:
        command = ["git", "-C", str(options.library), "describe", "--always", "--dirty"]
        notes["library"] = subprocess.check_output(command, text=True).strip()
    report = Report(
        "The chief's heartbeats",
        options.output,
        ("numpy",),
        repeats=f"{intervals} intervals of {INTERVAL:g} s per figure",
        **notes,
    )
    samples = {
        job: {n: measure(options.library, n, job, intervals) for n in sizes}
        for job in jobs
    }
    report.data["samples"] = samples
    head = ["job", "ranks", "user %", "kernel %", "% of a core"]
    head += ["bytes sent per interval", "frames"]
    rows = []
    for job, by_size in samples.items():
        for ranks, used in by_size.items():
            user, system = (
                100 * used[name] / used["seconds"] for name in ("user", "system")
            )
            count, frames = (
                used[name] * INTERVAL / used["seconds"] for name in ("bytes", "frames")
            )
            shares = (f"{share:.2f}" for share in (user, system, user + system))
            rows.append([job, ranks, *shares, f"{count:,.0f}", f"{frames:,.0f}"])
    report.add(table(head, rows))
    report.add("".join(f"{job}: {JOBS[job]}\n" for job in jobs))
    report.add(f"To be reached with {max(sizes)} ranks: {100 * MOST:g} % of a core.\n")
    report.write()


if __name__ == "__main__":
    main()
