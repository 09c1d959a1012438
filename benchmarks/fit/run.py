"""Examples/s of `fit` with two workers, beside one process and beside peers.

    make bench-fit

Every process is bound to one core (TensorFlow: intra=1, inter=2). The processes of
all columns are started once and take turns, round by round. "Two processes" are two
plain Keras processes that know nothing of each other, at once on the two cores: what
the machine can do. Examples/s of two workers are the sum over both.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import (
    Driver,
    Ended,
    Report,
    Team,
    arguments,
    cluster_env,
    free_ports,
    median,
    quiet_env,
    table,
)

PLAYER = str(HERE / "player.py")
# What each model's epochs are long, in steps: a second or so.
MODELS = {
    **{"mlp": 40, "cnn": 60, "lstm": 60, "embedding": 120, "digits": 300},
    **{"tables_adam": 6, "tables_adagrad": 6},
}
COLUMNS = {
    "plain": ("plain", 1),
    "one worker": ("ring", 1),
    "two processes": ("plain", 2),
    "two workers": ("ring", 2),
    "two processes, without XLA": ("plain", 2),  # with --jit
    "two workers, without XLA": ("ring", 2),
    "two workers, not compiled": ("ring", 2),
    "two workers, elastic": ("ring", 2),
    "two workers, jemalloc": ("ring", 2),
    "OneDeviceStrategy": ("one_device", 1),
    "MultiWorkerMirroredStrategy": ("multi_worker_mirrored", 2),
}


def start(driver: Driver, name: str, model: str, options: Any) -> Team:
    mode, size = COLUMNS[name]
    python = options.legacy if mode == "multi_worker_mirrored" else sys.executable

    def command(rank: int) -> list[str]:
        return [python, PLAYER, mode, model, driver.path, str(rank), str(size)]

    env = {"TF_USE_LEGACY_KERAS": "1"} if mode == "multi_worker_mirrored" else {}
    if "elastic" in name:
        env["KERASDIST_ELASTIC"] = "1"
    if "not compiled" in name:
        env["FIT_NUMPY"] = "1"
    if options.jit and "without XLA" not in name:
        env["FIT_JIT"] = "1"
    if "jemalloc" in name:
        env["LD_PRELOAD"] = options.jemalloc
    settings: list[dict[str, str]] = [{}] * size
    if mode == "multi_worker_mirrored":
        addresses = [f"127.0.0.1:{port}" for port in free_ports(size)]
        settings = [cluster_env(addresses, rank, "") for rank in range(size)]
    if mode == "ring" and size > 1:
        # A worker knows its rank from its job.
        return driver.start_job(f"{name}, {model}", command(0), size, env)
    return driver.start(
        f"{name}, {model}",
        command,
        size,
        lambda rank: {**quiet_env(), **settings[rank], **env},
    )


def measure(model: str, steps: int, options: Any) -> tuple[dict[str, Any], list[str]]:
    """Return each column's answers, and the columns of others that have ended early."""
    names = [
        name
        for name, (mode, _) in COLUMNS.items()
        if (mode != "multi_worker_mirrored" or options.legacy)
        and ("jemalloc" not in name or options.jemalloc)
        and ("without XLA" not in name or options.jit)
        and (not options.columns or name in options.columns)
    ]
    rounds = 2 if options.quick else options.rounds
    answers: dict[str, list[list[dict[str, float]]]] = {name: [] for name in names}
    with Driver() as driver:
        teams = {name: start(driver, name, model, options) for name in names}
        ended = []
        for turn in range(rounds + 1):
            for name, team in teams.items():
                if name in ended:
                    continue
                try:
                    answer = team.order({"steps": steps if turn else 5})
                except Ended:
                    if COLUMNS[name][0] in ("plain", "ring"):
                        raise
                    ended.append(name)
                    continue
                if turn:
                    answers[name].append(answer)
    return {name: turns for name, turns in answers.items() if turns}, ended


def summary(answers: dict[str, list[list[dict[str, float]]]]) -> list[list[str]]:
    total = {
        name: [sum(rank["examples"] for rank in turn) for turn in turns]
        for name, turns in answers.items()
    }
    rows = []
    for name, turns in answers.items():
        two = COLUMNS[name][1] == 2
        base = total.get("two processes" if two else "plain")
        # Of the same round: what else the machine does changes slowly.
        ratio = (
            "-"
            if base is None
            else f"{median(a / b for a, b in zip(total[name], base, strict=False)):.2f}"
        )
        spread = statistics.quantiles(total[name], n=4) if len(turns) > 1 else [0] * 3
        ranks = [rank for turn in turns for rank in turn]
        rows.append(
            [
                name,
                f"{median(total[name]):.0f}",
                f"{spread[0]:.0f}-{spread[2]:.0f}",
                ratio,
                f"{median(r['seconds'] for r in ranks) * 1e3:.2f}",
                f"{median(r['cpu'] for r in ranks) * 1e3:.2f}",
                f"{median(r['faults'] for r in ranks):.0f}",
            ]
        )
    return rows


def cost_of_a_step(answers: dict[str, list[list[dict[str, float]]]]) -> str:
    """What two workers add to a step of two processes, in ms; "" if one is missing."""
    found = []
    for what in ("seconds", "cpu"):
        rounds = [
            [median(rank[what] for rank in turn) for turn in answers.get(name, ())]
            for name in ("two workers", "two processes")
        ]
        if not all(rounds):
            return ""
        found.append(median(a - b for a, b in zip(*rounds, strict=False)) * 1e3)
    return (
        f"A step of two workers beside one of two processes: {found[0]:+.2f} ms, "
        f"{found[1]:+.2f} ms of processor time"
    )


HEAD = [
    "",
    "examples/s",
    "middle half",
    "of the limit",
    "ms/step",
    "CPU ms/step",
    "page faults/step",
]


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--legacy", help="the Python of an environment with tf_keras")
    parser.add_argument("--jemalloc", help="its library, for instance libjemalloc.so.2")
    parser.add_argument(
        "--jit", action="store_true", help="compile all models with XLA"
    )
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--columns", nargs="*", choices=COLUMNS, help="only these")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    report = Report(
        "fit with one and two workers, each bound to one core"
        + (", compiled with XLA" if options.jit else ""),
        options.output / "compiled" if options.jit else options.output,
        repeats=f"{options.rounds} rounds",
    )
    for model in options.models:
        steps = 3 if options.quick else MODELS[model]
        answers, ended = measure(model, steps, options)
        report.data[model] = answers
        report.add(f"{model}\n")
        report.add(table(HEAD, summary(answers)))
        if line := cost_of_a_step(answers):
            report.add(line)
        for name in ended:
            report.add(f"{name}: a process crashed; what was measured before counts.")
        report.write()  # what was measured stays, if the next one is interrupted


if __name__ == "__main__":
    main()
