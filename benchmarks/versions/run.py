"""Two versions of kerasdist, measured in turns on the same machine.

    make bench-versions BENCH_ARGS="--before COMMIT"

Both are installed from commits of this repository into folders of their own; the
version of after is the last commit. Of each round the ratio of after to before counts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import ROOT, Report, arguments, median, quiet_env, table

TRAIN = HERE.parent / "memory_startup" / "train.py"
IMPORTS = {
    "import kerasdist": ("", "import kerasdist"),
    "import of a strategy": ("import keras", "from kerasdist import RingStrategy"),
}
TIMED = """
import time
{}
begin = time.process_time()
{}
print("RESULT", time.process_time() - begin)
"""
UNITS = {"resident": (1e-6, "MB"), "first_step": (1.0, "s")}
COUNTS = {"Python calls of that step": (1.0, "")}


def install(commit: str, folder: Path) -> None:
    source = folder / "source"
    clone = ["git", "clone", "--quiet", "--no-checkout", ROOT, source]
    subprocess.run(clone, check=True, timeout=300)
    checkout = ["git", "-C", source, "checkout", "--quiet", commit]
    subprocess.run(checkout, check=True, timeout=300)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    pip += ["--no-build-isolation", "--target", str(folder / "package"), str(source)]
    subprocess.run(pip, check=True, timeout=300, capture_output=True)


def results(package: Path, *command: str | Path) -> list[str]:
    env = {
        **quiet_env(),
        "PYTHONPATH": str(package),
        "BENCH_STARTED": str(time.time()),
    }
    done = subprocess.run(
        [sys.executable, *command],
        cwd=package,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stdout}{done.stderr}"[-3000:])
    lines = (done.stdout + done.stderr).splitlines()
    return [line.partition("RESULT ")[2] for line in lines if "RESULT " in line]


def measure(package: Path, steps: int) -> dict[str, float]:
    found = {}
    for name, lines in IMPORTS.items():
        found[name] = float(results(package, "-c", TIMED.format(*lines))[0])
    launcher = ("-m", "kerasdist", "run", "-n", "2", "--output", "all")
    started = results(package, *launcher, TRAIN, "ring", "4")
    workers = [json.loads(one) for one in started]
    for name in UNITS:
        found[name] = max(worker[name] for worker in workers)
    job = results(package, *launcher, HERE / "job.py", str(steps))
    return found | json.loads(job[0])


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument(
        "--before", default="a7f7a9d", help="a commit (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    known = ["git", "-C", ROOT, "cat-file", "-e", f"{options.before}^{{commit}}"]
    if subprocess.run(known, stderr=subprocess.DEVNULL, check=False).returncode:
        parser.error(
            "--before must be a commit of this clone. Received: --before "
            f"{options.before}. A shallow clone gets all by `git fetch --unshallow`."
        )
    rounds = 1 if options.quick else options.repeats
    report = Report(
        f"{options.before} and the last commit, two workers on two cores",
        options.output,
        repeats=f"medians of {rounds} rounds",
    )
    samples: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    with tempfile.TemporaryDirectory() as made:
        packages = {name: Path(made) / name for name in samples}
        for name, commit in (("before", options.before), ("after", "HEAD")):
            install(commit, packages[name])
        for number in range(rounds):
            for name in sorted(samples, reverse=number % 2 == 0):
                package = packages[name] / "package"
                found = measure(package, 4 if options.quick else 60)
                samples[name].append(found)
    report.data["samples"] = samples
    rows = []
    for name in samples["after"][0]:
        scale, unit = (UNITS | COUNTS).get(name, (1e3, "ms"))
        before, after = ([one[name] for one in many] for many in samples.values())
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        shown = [f"{median(values) * scale:.3g}" for values in (before, after)]
        rows.append([name, unit, *shown, f"{median(ratios):.2f}"])
    head = ["", "", "before", "after", "after / before"]
    report.add(table(head, rows))
    report.write()


if __name__ == "__main__":
    main()
