"""What kerasdist adds to a process: resident memory, and time until the first step.

    make bench-memory-startup

`train.py` (an MLP of 4 million parameters) as one plain process, as two plain processes
at once, and as two workers of `kerasdist run`, in turns. Beside the two processes the
two workers have the same machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import Report, arguments, median, quiet_env, table

TRAIN = str(HERE / "train.py")
TITLES = {
    "plain": "plain Keras",
    "two plain": "plain Keras, two at once",
    "run": "`kerasdist run -n 2`",
}


def measure(kind: str, batches: int) -> list[dict[str, float]]:
    """Run once; return each process's result."""
    env = {**quiet_env(), "BENCH_STARTED": str(time.time())}
    plain = [sys.executable, TRAIN, "plain", str(batches)]
    launcher = [sys.executable, "-m", "kerasdist", "run", "-n", "2"]
    commands = {
        "plain": [plain],
        "two plain": [plain, plain],
        "run": [[*launcher, "--output", "all", TRAIN, "ring", str(batches)]],
    }[kind]
    processes = [
        subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in commands
    ]
    results = []
    for process in processes:
        output, _ = process.communicate(timeout=300)
        if process.returncode:
            sys.exit(f"{kind} failed:\n{output[-3000:]}")
        results += [
            json.loads(line.partition("RESULT ")[2])
            for line in output.splitlines()
            if "RESULT " in line
        ]
    return results


def compare(report: Report, medians: dict[str, dict[str, float]]) -> None:
    """What was to be reached, beside what was measured."""
    gradients = medians["run"]["gradient_bytes"]
    extra = medians["run"]["resident"] - medians["two plain"]["resident"]
    limit = 2.5 * gradients + 64e6
    later = medians["run"]["first_step"] - medians["two plain"]["first_step"]
    alone = medians["run"]["first_step"] - medians["plain"]["first_step"]
    for text, value, most, unit in (
        ("extra resident bytes per worker", extra / 1e6, limit / 1e6, "MB"),
        ("first step later than two plain processes at once", later, 1.5, "s"),
        ("first step later than one plain process", alone, 1.5, "s"),
    ):
        verdict = "reached" if value <= most else "MISSED"
        report.add(f"{text}: {value:.2f} {unit} (at most {most:.2f} {unit}: {verdict})")
    report.add(f"The gradients are {gradients / 1e6:.1f} MB.\n")


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", type=int, default=20)
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.batches = 1, 2
    kinds = ["run"] if options.quick else list(TITLES)
    report = Report(
        "Memory and time that kerasdist adds to a worker",
        options.output,
        ("numpy", "tensorflow", "keras"),
        repeats=str(options.repeats),
    )
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for _ in range(options.repeats):
        for name in kinds:
            # Of one run the slowest process, and the largest.
            results = measure(name, options.batches)
            samples[name].append(
                {key: max(result[key] for result in results) for key in results[0]}
            )
    report.data["samples"] = samples
    medians = {
        name: {key: median([one[key] for one in many]) for key in many[0]}
        for name, many in samples.items()
    }
    report.data["medians"] = medians
    report.add("Medians:\n")
    report.add(
        table(
            ["", "first step after, s", "resident, MB", "RSS, MB", "segments, MB"],
            [
                [
                    title,
                    f"{medians[name]['first_step']:.2f}",
                    *(
                        f"{medians[name][key] / 1e6:.0f}"
                        for key in ("resident", "rss", "segments")
                    ),
                ]
                for name, title in TITLES.items()
                if name in kinds
            ],
        )
    )
    if not options.quick:
        compare(report, medians)
    report.write()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
