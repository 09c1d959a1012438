"""What TensorFlow's and Keras's own strategies do today, and ours, case by case.

    python benchmarks/peers/reproduce.py                # all cases
    python benchmarks/peers/reproduce.py mirrored-clip  # one

Needs the package to be installed, on Linux. Each case is a job of local processes
that run `train.py`; it is ended after 120 s. Prints the environment, and of each
process its exit code and what it said last.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SECONDS = 120.0
# Case -> how many tasks of each type (none: one process without TF_CONFIG), command.
CASES: dict[str, tuple[dict[str, int], list[str]]] = {
    "keras-distribution": ({}, ["keras_distribution.py"]),
    "multi-worker-mirrored": (
        {"worker": 2},
        ["train.py", "multi_worker_mirrored"],
    ),
    "multi-worker-mirrored-dataset": (
        {"worker": 2},
        ["train.py", "multi_worker_mirrored", "--dataset"],
    ),
    "parameter-server": (
        {"chief": 1, "worker": 2, "ps": 1},
        ["train.py", "parameter_server"],
    ),
    "parameter-server-dataset": (
        {"chief": 1, "worker": 2, "ps": 1},
        ["train.py", "parameter_server", "--dataset"],
    ),
    "ring": ({"worker": 2}, ["train.py", "ring"]),
    "plain": ({}, ["train.py", "none"]),
    # 19 rows in batches of 16: the last batch has 3, 2 on one replica and 1 on the
    # other.
    "plain-uneven": ({}, ["train.py", "none", "--rows", "19"]),
    "mirrored-uneven": ({}, ["train.py", "mirrored", "--rows", "19"]),
    "ring-uneven": ({"worker": 2}, ["train.py", "ring", "--rows", "19"]),
    "plain-small": ({}, ["train.py", "none", "--rows", "3"]),
    "mirrored-small": ({}, ["train.py", "mirrored", "--rows", "3"]),
    "ring-small": ({"worker": 2}, ["train.py", "ring", "--rows", "3"]),
    # One step at rate 1 with global_clipnorm=1: a weight can move by 1.0 at most.
    "plain-clip": ({}, ["train.py", "none", "--rows", "16", "--clip"]),
    "mirrored-clip": ({}, ["train.py", "mirrored", "--rows", "16", "--clip"]),
    "ring-clip": ({"worker": 2}, ["train.py", "ring", "--rows", "16", "--clip"]),
}


def environment() -> str:
    packages = ("tensorflow", "keras", "numpy", "kerasdist")
    found = []
    for name in packages:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} from a checkout")
    lines = [
        f"date      {datetime.date.today().isoformat()}",
        f"machine   {platform.machine()}, {os.cpu_count()} cores, no GPU used",
        f"system    {platform.system()}",
        f"python    {platform.python_version()}",
        f"packages  {', '.join(found)}",
    ]
    return "\n".join(lines)


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago: nobody else is expected to take them."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


def run(tasks: dict[str, int], command: list[str]) -> list[tuple[str, str, str]]:
    """Run one job; return each task's name, how it ended, and its output."""
    ports = iter(free_ports(sum(tasks.values())))
    cluster = {
        kind: [f"127.0.0.1:{next(ports)}" for _ in range(count)]
        for kind, count in tasks.items()
    }
    who: list[tuple[str, int]] = [
        (kind, index) for kind, count in tasks.items() for index in range(count)
    ]
    env = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "KERAS_BACKEND": "tensorflow",
    }
    env.pop("TF_CONFIG", None)
    started: list[tuple[str, subprocess.Popen[bytes], Path]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for kind, index in who or [("process", 0)]:
                if who:
                    task = {"type": kind, "index": index}
                    env["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
                log = Path(folder, f"{kind}{index}.log")
                with log.open("wb") as file:
                    process = subprocess.Popen(
                        [sys.executable, str(HERE / command[0]), *command[1:]],
                        env=env,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                started.append((f"{kind} {index}" if who else kind, process, log))
            # TensorFlow's servers never end by themselves: a job is over when its
            # chief (or all workers, without one) is.
            main = started[:1] if "chief" in tasks else started
            end = time.monotonic() + SECONDS
            for _, process, _ in main:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))
            codes = [process.poll() for _, process, _ in started]
        finally:
            for _, process, _ in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return [
            (
                name,
                "still running, ended by us" if code is None else f"exit code {code}",
                log.read_text(errors="replace"),
            )
            for (name, _, log), code in zip(started, codes, strict=True)
        ]


def last_words(output: str) -> list[str]:
    """Return the last exception with where it was raised, else what was printed."""
    lines = output.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most")]
    if not starts:
        return [
            line
            for line in lines
            if line and not line.startswith(("I0000", "W0000", "WARNING: All log"))
        ]
    frames, message = [], []
    for line in lines[starts[-1] + 1 :]:
        if message or not line.startswith(" "):
            message.append(line)
        elif line.lstrip().startswith("File "):
            frames.append(line.strip().replace('"', "").split("site-packages/")[-1])
    if len(message) > 3:  # it shows a value
        message = [message[0], "...", message[-1]]
    in_keras = [frame for frame in frames if frame.startswith("keras/")]
    return [*message, "raised in:", *in_keras[-2:], *frames[-1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="case", help=", ".join(CASES))
    chosen = parser.parse_args().cases or list(CASES)
    unknown = [name for name in chosen if name not in CASES]
    if unknown:
        parser.error(f"unknown cases {unknown}; expected some of {list(CASES)}")
    print(environment(), flush=True)
    for name in chosen:
        tasks, command = CASES[name]
        print(f"\n== {name}: {' '.join(command)}", flush=True)
        for task, how, output in run(tasks, command):
            print(f"-- {task}: {how}")
            for line in last_words(output):
                print(f"   {line[:300]}")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
