"""Steps/s through a parameter server, beside the ring, plain Keras and TensorFlow.

    make bench-server-steps

Two workers and one server, each with `intra=1, inter=2` threads; no process is bound to
a core: all of a column share the machine's. The processes of all columns are started
once and take turns, round by round. A step is one worker's, with its batch; steps/s are
the sum over the workers.
"""

from __future__ import annotations

import json
import statistics
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
    free_ports,
    median,
    quiet_env,
    servers,
    table,
)

PLAYER = str(HERE / "player.py")
WORKERS = 2
# Rows of a worker's batch, as in `player.py`; steps of an epoch, a second or so.
MODELS = {"digits": (32, 400), "mlp": (128, 50)}
TITLES = {
    "mlp": "MLP of 4 million parameters (784 -> 4 x 1024 -> 10), batch 128 per worker",
    "digits": "digits MLP (64 -> 128 -> 64 -> 10), batch 32 per worker",
}
# Mode, and for TensorFlow's steps_per_execution.
COLUMNS: dict[str, tuple[str, int]] = {
    "plain Keras, one process": ("plain", 1),
    "RingStrategy": ("ring", 1),
    "sync": ("sync", 1),
    "async": ("free", 1),
    "TensorFlow": ("tensorflow", 1),
    "TensorFlow, 10 steps per call": ("tensorflow", 10),
}
TARGET = 2.0


def start(driver: Driver, name: str, model: str, legacy: str | None) -> Team:
    mode, execution = COLUMNS[name]
    title = f"{name}, {model}"
    command = [sys.executable, PLAYER, mode, model, driver.path]
    if mode == "tensorflow":
        return _tensorflow(driver, title, [legacy or "", *command[1:]], execution)
    if mode == "plain":
        return driver.start(title, lambda rank: [*command, "0"], 1)
    return driver.start_job(title, [*command, "0"], WORKERS, servers=servers(mode))


def _tensorflow(driver: Driver, title: str, command: list[str], execution: int) -> Team:
    """A coordinator, the workers, and a server: ranks in this order."""
    tasks = [("chief", 0), *(("worker", i) for i in range(WORKERS)), ("ps", 0)]
    cluster: dict[str, list[str]] = {}
    for (kind, _), port in zip(tasks, free_ports(len(tasks)), strict=True):
        cluster.setdefault(kind, []).append(f"127.0.0.1:{port}")

    def env(rank: int) -> dict[str, str]:
        kind, index = tasks[rank]
        place = {"cluster": cluster, "task": {"type": kind, "index": index}}
        return {
            **quiet_env(),
            "TF_CONFIG": json.dumps(place),
            "TF_USE_LEGACY_KERAS": "1",
        }

    return driver.start(title, lambda rank: [*command, str(execution)], len(tasks), env)


def turn(team: Team, mode: str, steps: int) -> dict[str, Any]:
    """One round of one column."""
    before = sum(team.cpu())
    # TensorFlow's coordinator gives its workers their orders itself.
    answers = team.order({"steps": steps}, [0] if mode == "tensorflow" else None)
    return {
        "steps_per_second": sum(a["steps_per_second"] for a in answers),
        "cpu": (sum(team.cpu()) - before) / sum(a["steps"] for a in answers),
    }


def measure(names: list[str], model: str, options: Any) -> dict[str, list[Any]]:
    rounds, steps = options.rounds, options.steps or MODELS[model][1]
    if options.quick:
        rounds, steps = 1, 8
    turns: dict[str, list[Any]] = {name: [] for name in names}
    with Driver() as driver:
        teams = {name: start(driver, name, model, options.legacy) for name in names}
        for name, team in teams.items():
            turn(team, COLUMNS[name][0], 20)
        for _ in range(rounds):
            for name, team in teams.items():
                turns[name].append(turn(team, COLUMNS[name][0], steps))
    return turns


HEAD = [
    "",
    "steps/s",
    "middle half",
    "examples/s",
    "updates/s",
    "of TensorFlow",
    "CPU ms/step",
]


def summary(model: str, turns: dict[str, list[Any]]) -> list[list[str]]:
    rates = {
        name: [one["steps_per_second"] for one in found]
        for name, found in turns.items()
    }
    base = rates.get("TensorFlow")
    rows = []
    for name, found in rates.items():
        # Of the same round: what else the machine does changes slowly.
        ratios = [a / b for a, b in zip(found, base or [], strict=False)]
        quarters = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
        shared = WORKERS if COLUMNS[name][0] in ("ring", "sync") else 1
        rows.append(
            [
                name,
                f"{median(found):.1f}",
                f"{quarters[0]:.1f}-{quarters[2]:.1f}",
                f"{median(found) * MODELS[model][0]:.0f}",
                f"{median(found) / shared:.1f}",
                f"{median(ratios):.2f}" if ratios else "-",
                f"{median(one['cpu'] for one in turns[name]) * 1e3:.2f}",
            ]
        )
    return rows


def target(turns: dict[str, list[Any]]) -> str:
    """What was to be reached, beside what was measured."""
    pairs = zip(turns["async"], turns["TensorFlow"], strict=True)
    ratio = median(a["steps_per_second"] / b["steps_per_second"] for a, b in pairs)
    verdict = "reached" if ratio >= TARGET else "MISSED"
    return f"async over TensorFlow: {ratio:.2f} (at least {TARGET:g}: {verdict})\n"


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--legacy", help="the Python of an environment with tf_keras")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--columns", nargs="*", choices=COLUMNS, help="only these")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, help="of all workers in an epoch")
    options = parser.parse_args()
    names = [
        name
        for name, (mode, _) in COLUMNS.items()
        if (mode != "tensorflow" or options.legacy)
        and (not options.columns or name in options.columns)
    ]
    report = Report(
        f"fit with {WORKERS} workers and a parameter server",
        options.output,
        repeats=f"{options.rounds} rounds",
    )
    for model in options.models:
        turns = measure(names, model, options)
        report.data[model] = turns
        report.add(f"{TITLES[model]}\n")
        report.add(table(HEAD, summary(model, turns)))
        if {"async", "TensorFlow"} <= set(turns):
            report.add(target(turns))
    report.write()


if __name__ == "__main__":
    main()
