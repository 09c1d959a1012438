"""Two processes on CPUs: `keras.distribution` on torch beside kerasdist.

    make bench-rivals

Each case runs in one process and in two, with Keras on torch and its `DataParallel`,
and with Keras on TensorFlow and `RingStrategy`. The two should have the numbers of the
one. The data are items of 8 rows. `DataParallel` deals them out, so its step has two of
them, and the one process is given items of 16. A job is ended after 60 s.
"""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from train import CASES

from common import Report, arguments, table
from common.places import cluster_env, free_ports, quiet_env

SECONDS = 60


def run(python: str, case: str, mode: str, envs: list[Mapping[str, str]]) -> list[str]:
    """Run one process for each environment; return what each has said last."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, str(i)) for i in range(len(envs))]
        started = []
        for path, env in zip(paths, envs, strict=True):
            with path.open("wb") as file:
                started.append(
                    subprocess.Popen(
                        [python, str(HERE / "train.py"), case, mode],
                        env=dict(env),
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
        for process in started:
            try:
                process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return [
            said(path.read_text(errors="replace"), process.returncode)
            for path, process in zip(paths, started, strict=True)
        ]


def said(output: str, code: int) -> str:
    """Return what a process has found, the begin of its last error, or its end."""
    for line in output.splitlines():
        if line.startswith("RESULT "):
            return ", ".join(f"{k} {v}" for k, v in json.loads(line[7:]).items())
    if code < 0:
        return f"waits; ended after {SECONDS} s"
    errors = re.findall(r"^(?:\[rank\d\]: )?(\w*Error: .*)", output, re.MULTILINE)
    return errors[-1].split(". ")[0][:160] if errors else f"exit code {code}"


def torch_envs(count: int) -> list[Mapping[str, str]]:
    env = quiet_env() | {"KERAS_BACKEND": "torch"}
    del env["PYTHONPATH"]  # kerasdist isn't meant
    if count == 1:
        # Each of two processes takes every second item of 8 rows: 16 a step.
        return [env | {"ITEM_ROWS": "16"}]
    (port,) = free_ports(1)
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    return [env | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]


def ring_envs(count: int) -> list[Mapping[str, str]]:
    if count == 1:
        return [quiet_env()]
    workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    secret = secrets.token_hex(16)
    return [quiet_env() | cluster_env(workers, rank, secret) for rank in range(2)]


def versions(python: str) -> str:
    code = (
        "import importlib.metadata as m; "
        "print(*(f'{d.name} {d.version}' for d in m.distributions()"
        " if d.name.lower().split('-')[0] in ('keras', 'torch')), sep=', ')"
    )
    return subprocess.check_output([python, "-c", code], text=True).strip()


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--torch", required=True, help="the Python with Keras on torch")
    options = parser.parse_args()
    cases = list(CASES)[:1] if options.quick else list(CASES)
    report = Report(
        "Two processes on CPUs", options.output, torch=versions(options.torch)
    )
    rows: list[list[Any]] = []
    for case in cases:
        for name, python, envs, mode in (
            ("DataParallel, torch", options.torch, torch_envs, "data_parallel"),
            ("RingStrategy, TensorFlow", sys.executable, ring_envs, "kerasdist"),
        ):
            (one,) = run(python, case, "plain", envs(1))
            two = run(python, case, mode, envs(2))
            rows.append([case, name, one, *two])
            report.data.setdefault("found", []).append(rows[-1])
            print(*rows[-1], sep=" | ", flush=True)
    head = ["case", "two processes by", "one process", "rank 0", "rank 1"]
    report.add(table(head, rows))
    report.write()


if __name__ == "__main__":
    main()
