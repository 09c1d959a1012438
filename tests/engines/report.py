"""Run kerasdist on each engine for real, and print one line each: `make engines`.

The exit code is 1 if one that was found has failed. What wasn't found is named.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_HERE = "tests/engines"
ENGINES = {
    "Ray": f"{_HERE}/test_ray_and_spark.py::test_ray",
    "Spark": f"{_HERE}/test_ray_and_spark.py::test_spark "
    f"{_HERE}/test_ray_and_spark.py::test_sparks_distributor",
    "Slurm": f"{_HERE}/test_slurm_jobs.py",
    "MPI": "tests/collectives/backends/test_mpi.py"
    "::test_training_needs_no_other_settings",
    "ssh": "tests/cli/run/hosts/test_run_on_hosts.py::test_the_commands_of_the_readme",
    "Kubernetes": f"{_HERE}/test_manifests.py",
    "Docker": f"{_HERE}/test_manifests.py::test_the_image_trains",
}
_DEADLINE = 1800.0


def run(tests: str) -> tuple[str, str]:
    """Return "ok", "failed" or "not found", and the reason or the end of the output."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
    # Elsewhere what is missing is a failure.
    env = {name: value for name, value in os.environ.items() if name != "CI"}
    try:
        done = subprocess.run(
            [*command, "-o", "faulthandler_timeout=0", *tests.split()],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_DEADLINE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "failed", f"not finished after {_DEADLINE:.0f} s"
    if done.returncode != 0:
        return "failed", done.stdout[-6000:]
    skipped = re.findall(r"^SKIPPED \[\d+\] \S+ (.*)$", done.stdout, re.M)
    reasons = "; ".join(dict.fromkeys(skipped))
    if not re.search(r"\d passed", done.stdout):
        return "not found", reasons
    return "ok", f"not all: {reasons}" if reasons else ""


def main(names: list[str]) -> int:
    code = 0
    for name in names or ENGINES:
        begin = time.monotonic()
        state, text = run(ENGINES[name])
        code |= state == "failed"
        text = f"\n{text}" if state == "failed" else f"  {text}".rstrip()
        seconds = time.monotonic() - begin
        print(f"{name:12}{state:10}{seconds:5.0f} s{text}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
