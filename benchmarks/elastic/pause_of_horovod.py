"""The pause of an elastic Horovod job after a worker is killed, measured like `run.py`.

    python benchmarks/elastic/pause_of_horovod.py ENVIRONMENT [--repeats 3]

ENVIRONMENT is the folder of a virtual environment with Horovod and a TensorFlow that it
builds with, see `benchmarks/peers/horovod.sh`. Two workers on this machine train the
model of `run.py` with the script of Horovod's pages for elastic Keras, which commits
its state after each batch. The second one kills itself in a step. The pause is the time
from the end of the last step before to the end of the first one after it, on the other
one, less the median of the steps before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import tempfile
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
STEPS, STEP = 30, 20
_SECONDS = 600.0


def run(environment: Path, parameters: int) -> float:
    """Run one job; return the pause in seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Two names of this machine: Horovod excludes the host of a lost worker.
        hosts = folder / "hosts.sh"
        hosts.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")
        hosts.chmod(0o755)
        command = [
            *(str(environment / "bin" / "horovodrun"), "--gloo", "-np", "2"),
            *("--min-np", "1", "--host-discovery-script", str(hosts)),
            *(str(environment / "bin" / "python"), str(HERE / "horovod_player.py")),
            *(str(parameters), str(STEPS), str(STEP), name),
        ]
        environ = {
            **os.environ,
            "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TF_NUM_INTRAOP_THREADS": "1",
            "TF_NUM_INTEROP_THREADS": "1",
        }
        with (folder / "log").open("wb") as log:
            done = subprocess.run(
                command,
                env=environ,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=_SECONDS,
                check=False,
            )
        if not (folder / "times.json").exists():
            text = (folder / "log").read_text(errors="replace")
            raise RuntimeError(f"horovodrun ended with {done.returncode}:\n{text}")
        times = json.loads((folder / "times.json").read_text())
        killed = float((folder / "killed").read_text())
    if times["size"] != 1:
        raise RuntimeError(f"{times['size']} workers are left, not 1.")
    ends = times["ends"]
    before = [end for end in ends if end < killed]
    after = min(end for end in ends if end > killed)
    usual = median(b - a for a, b in itertools.pairwise(before[4:]))
    return after - before[-1] - usual


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("environment", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--millions", type=int, nargs="+", default=[4, 25])
    options = parser.parse_args()
    print("| parameters | workers | pause of Horovod, s |")
    print("| ---: | ---: | ---: |")
    for millions in options.millions:
        pauses = [
            run(options.environment, 1_000_000 * millions)
            for _ in range(options.repeats)
        ]
        print(f"| {millions} M | 2 | {median(pauses):.2f} |", flush=True)


if __name__ == "__main__":
    main()
