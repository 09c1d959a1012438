"""The pause of an elastic job after a worker is killed, by parts.

    make bench-elastic

Jobs of 2 to 4 workers on this machine train a model; one worker, or the chief, kills
itself (SIGKILL) as a step begins. Measured on the others, in seconds after that:

    detection    until training is suspended
    agreement    from there until the next members are decided
    connections  from there until they are connected
    step         from there until the step is done, by a function traced for them
    pause        the end of that step less the end of the one before it, less the
                 median of the steps before

The cost when nothing fails is a column of `benchmarks/fit`: two workers, elastic.
"""

from __future__ import annotations

import itertools
import json
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

from common import Report, arguments, cluster_env, free_ports, median, quiet_env, table

PLAYER = str(HERE / "player.py")
STEPS, STEP = 30, 20
PARTS = ("detection", "agreement", "connections", "step", "pause")
_SECONDS = 300.0


def run(size: int, victim: int, parameters: int, folder: Path) -> dict[str, float]:
    """Run one job; return the largest of each part over its survivors."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(size)]
    secret = secrets.token_hex(16)
    output = folder / secrets.token_hex(4)
    command = [sys.executable, PLAYER, str(parameters), str(STEPS), str(STEP)]
    workers = [
        subprocess.Popen(
            [*command, str(victim), str(output)],
            env={**quiet_env(), **cluster_env(addresses, rank, secret)},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(size)
    ]
    try:
        for rank, worker in enumerate(workers):
            code = worker.wait(_SECONDS)
            if (code == 0) == (rank == victim):
                raise RuntimeError(f"Worker {rank} of {size} ended with {code}.")
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    found = [
        json.loads(Path(f"{output}-{rank}.json").read_text()) for rank in range(size)
    ]
    killed = found.pop(victim)["killed"]
    samples = [parts_of(each, killed) for each in found]
    return {part: max(sample[part] for sample in samples) for part in PARTS}


def parts_of(times: dict[str, list], killed: float) -> dict[str, float]:
    """Return the parts of a survivor's pause."""
    began, agreed, connected = times["changes"][0]
    ends = times["ends"]
    usual = median([b - a for a, b in itertools.pairwise(ends[4:STEP])])
    return {
        "detection": began - killed,
        "agreement": agreed - began,
        "connections": connected - agreed,
        "step": ends[STEP] - connected,
        "pause": ends[STEP] - ends[STEP - 1] - usual,
    }


def main() -> None:
    """Measure, and write the tables."""
    parser = arguments(__doc__, HERE)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--millions", type=int, nargs="+", default=[4, 25])
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    sizes = [1_000_000 * n for n in ([4] if options.quick else options.millions)]
    teams = [(2, 1)] if options.quick else [(2, 1), (2, 0), (3, 1), (4, 1)]
    report = Report("The pause of an elastic job after a loss", options.output)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for parameters in sizes:
            for size, victim in teams:
                samples = [
                    run(size, victim, parameters, Path(folder)) for _ in range(repeats)
                ]
                report.data.setdefault("samples", []).append(
                    {"workers": size, "parameters": parameters, "samples": samples}
                )
                rows.append(
                    [
                        f"{parameters / 1e6:g} M",
                        str(size),
                        "the chief" if victim == 0 else "another one",
                        *(f"{median([s[p] for s in samples]):.2f}" for p in PARTS),
                    ]
                )
    head = ["parameters", "workers", "killed", *PARTS]
    report.add(table(head, rows))
    report.write()


if __name__ == "__main__":
    main()
