"""Do two stages work at the same time? GPipe's micro-batches over two processes.

    make bench-pipeline

An MLP of two equal stages is trained by two processes, each bound to one core: the
first stage is on one's CPU, the second on the other's. Beside it is the same model in
one process on one core, without a strategy. If the stages overlapped as well as they
can, a step would take (M + S - 1) / (M S) of that, with M micro-batches, S = 2 stages.
"""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import (
    ROOT,
    Driver,
    Report,
    Team,
    arguments,
    cluster_env,
    free_ports,
    median,
    plot,
    quiet_env,
    table,
)

sys.path.insert(0, str(ROOT))
from kerasdist.placement.micro_batch_order import Pipeline

PLAYER = str(HERE / "player.py")
STAGES = ("CPU:0 of rank 0", "CPU:0 of rank 1")


def start(driver: Driver, parts: int) -> Team:
    command = [sys.executable, PLAYER, driver.path, str(parts)]
    if not parts:
        return driver.start("one process", lambda rank: command, 1)
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    secret = secrets.token_hex(32)
    return driver.start(
        f"{parts} micro-batches",
        lambda rank: command,
        1,  # the other one serves, and takes no orders
        lambda rank: {**quiet_env(), **cluster_env(addresses, rank, secret)},
        processes=2,
    )


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    options = parser.parse_args()
    parts = [2] if options.quick else options.parts
    steps = 1 if options.quick else options.steps
    report = Report(
        "A step of two stages in two processes, by micro-batches",
        options.output,
        repeats=f"{steps} steps, after 2",
    )
    seconds, loss, cpu = {}, {}, {}
    for count in (0, *parts):
        with Driver() as driver:
            team = start(driver, count)
            team.order({"steps": 2})
            before = team.cpu()
            (found,) = team.order({"steps": steps})
            cpu[count] = [
                (b - a) / steps for a, b in zip(before, team.cpu(), strict=True)
            ]
        seconds[count], loss[count] = found["seconds"], found["loss"]
    serial = median(seconds[0])
    rows = [["one process", f"{serial * 1e3:.0f}", "-", "-", f"{cpu[0][0] * 1e3:.0f}"]]
    bounds = {}
    for count in parts:
        bounds[count] = serial * Pipeline(stages=STAGES, micro_batches=count).bound
        step = median(seconds[count])
        rows.append(
            [
                f"M={count}",
                f"{step * 1e3:.0f}",
                f"{bounds[count] * 1e3:.0f}",
                f"{bounds[count] / step:.0%}",
                " + ".join(f"{used * 1e3:.0f}" for used in cpu[count]),
            ]
        )
    report.data.update(rows=rows, seconds=seconds, loss=loss, bounds=bounds, cpu=cpu)
    head = ["", "ms per step", "bound", "of the bound", "ms of CPU per process"]
    report.add(table(head, rows))
    report.add(f"\n{Pipeline(stages=('rank 0', 'rank 1'), micro_batches=max(parts))}")
    report.write()
    if not options.quick:
        plot(
            options.output / "plot.svg",
            {
                "measured": [(n, median(seconds[n]) * 1e3) for n in parts],
                "bound": [(n, bounds[n] * 1e3) for n in parts],
                "model: one process": [(n, serial * 1e3) for n in parts],
            },
            x="micro-batches",
            y="ms per step",
            log=False,
        )


if __name__ == "__main__":
    main()
