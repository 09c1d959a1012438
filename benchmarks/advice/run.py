"""Is the strategy that `kerasdist advise` proposes the fastest one?

    make bench-advice     # as root: it makes hosts out of network namespaces

Jobs on up to four hosts, and a server on a fifth, sleep where others compute; links are
shaped. In each situation `kerasdist advise` measures one worker and proposes a
strategy. Then all strategies that it knows train, for real. The advice is right if what
it proposes is at least 0.9 times as fast as the fastest.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import (
    Driver,
    Report,
    arguments,
    cluster_env,
    make_hosts,
    quiet_env,
    shape,
    start_on_hosts,
    table,
)

JOB = str(HERE / "job.py")
WORKERS = 4
RIGHT = 0.9
SMALL, MEDIUM, LARGE = (64, 2), (512, 4), (1024, 3)


def case(
    model: tuple[int, int],
    compute: float,
    link: str,
    *,
    speeds: tuple[float, ...] = (),
    table: bool = False,
    lossy: bool = False,
) -> dict[str, Any]:
    width, depth = model
    return {
        "width": width,
        "depth": depth,
        "rows": 16,
        "compute": compute,
        "link": link,
        "speeds": list(speeds),
        "table": table,
        "lossy": lossy,
    }


SITUATIONS = {
    "small model, fast link": case(SMALL, 0.2, "2G"),
    "small model, slow link": case(SMALL, 0.2, "20M"),
    "4 MB, fast link": case(MEDIUM, 0.4, "2G"),
    "4 MB, slow link": case(MEDIUM, 0.2, "50M"),
    "4 MB, long steps": case(MEDIUM, 1.0, "200M"),
    "13 MB, short steps": case(LARGE, 0.2, "200M"),
    "13 MB, long steps": case(LARGE, 1.5, "200M"),
    "speeds 4:2:1:1": case(SMALL, 0.1, "2G", speeds=(1.0, 0.5, 0.25, 0.25)),
    "speeds 2:1:1:1, slow link": case(MEDIUM, 0.3, "200M", speeds=(1, 0.5, 0.5, 0.5)),
    "large embedding, slow link": case(SMALL, 0.1, "10M", table=True),
    "large embedding, fast link": case(SMALL, 0.3, "2G", table=True),
    "lossy: 4 MB, slow link": case(MEDIUM, 0.3, "50M", lossy=True),
    "lossy: 4 MB, link of 200M": case(MEDIUM, 0.2, "200M", lossy=True),
    "lossy: small model, speeds 4:2:1:1": case(
        SMALL, 0.1, "2G", speeds=(1.0, 0.5, 0.25, 0.25), lossy=True
    ),
}
RATES = {
    "10M": 10**7,
    "20M": 2 * 10**7,
    "50M": 5 * 10**7,
    "200M": 2 * 10**8,
    "2G": 2 * 10**9,
}
RING, SERVERS = "kerasdist.RingStrategy", "kerasdist.ParameterServerStrategy"
EXACT = (f"{RING}()", f'{RING}(balance="measured")', f"{SERVERS}()")
LOSSY = (
    f'{RING}(compression="bf16")',
    f'{RING}(compression="powersgd")',
    f'{RING}(compression="topk")',
    f"{RING}(local_steps=8)",
    f'{SERVERS}("async", max_staleness=4)',
)


def advised(situation: dict[str, Any]) -> tuple[str, int]:
    """Return the strategy that is proposed, and its number of workers."""
    options = ["--workers", str(WORKERS), "--network", situation["link"]]
    options += ["--json", "--steps", "20"]
    if situation["speeds"]:
        options += ["--speeds", ",".join(map(str, situation["speeds"]))]
    if situation["lossy"]:
        options.append("--lossy")
    command = [sys.executable, "-m", "kerasdist", "advise", *options, JOB]
    env = {**quiet_env(), "TF_NUM_INTEROP_THREADS": "4", "CASE": json.dumps(situation)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    found = json.loads(done.stdout)
    return found["strategy"], found["workers"]


def start_with_server(driver: Driver, hosts: Any, env: dict[str, str]) -> Any:
    """Start workers on all hosts but the last one, which gets a server."""
    addresses = [f"{hosts.address(n)}:{5300 + n}" for n in range(len(hosts.names))]
    secret = secrets.token_hex(32)

    def environ(n: int) -> dict[str, str]:
        kind, index = ("worker", n) if n < WORKERS else ("ps", 0)
        place = cluster_env(
            addresses[:WORKERS], index, secret, servers=addresses[WORKERS:], kind=kind
        )
        return {**quiet_env(), **place, **env}

    return driver.start(
        "servers",
        lambda n: [*hosts.prefix(n), sys.executable, JOB, driver.path, str(n)],
        WORKERS,
        environ,
        processes=WORKERS + 1,
    )


def main() -> None:
    parser = arguments(__doc__, HERE)
    options = parser.parse_args()
    situations = dict(list(SITUATIONS.items())[: 1 if options.quick else None])
    report = Report(
        "What is advised, and what is the fastest",
        options.output,
        ("numpy", "tensorflow", "keras"),
        repeats="one epoch of 5 steps",
    )
    env = {"TF_NUM_INTEROP_THREADS": "4"}
    rows = []
    right = 0
    with (
        make_hosts(WORKERS) as hosts,
        make_hosts(WORKERS + 1) as with_server,
        make_hosts(2) as two,
        Driver() as driver,
    ):
        ring = start_on_hosts(driver, hosts, "ring", [JOB, driver.path], env)
        served = start_with_server(driver, with_server, env)
        pair = start_on_hosts(driver, two, "pair", [JOB, driver.path], env)
        alone = driver.start(
            "alone",
            lambda rank: [sys.executable, JOB, driver.path, "0"],
            1,
            lambda rank: {**quiet_env(), **env},
        )
        for name, situation in situations.items():
            strategy, count = advised(situation)
            for each in (hosts, with_server, two):
                shape(each, RATES[situation["link"]])
            speeds: dict[tuple[str, int], float] = {}
            exact = EXACT if situation["speeds"] else (EXACT[0], EXACT[2])
            for kind in (*exact, *(LOSSY if situation["lossy"] else ())):
                for team, workers in ((alone, 1), (pair, 2), (ring, 4), (served, 4)):
                    if (SERVERS in kind) != (team is served):
                        continue
                    if workers < WORKERS and kind != EXACT[0]:
                        continue
                    order = {"case": situation, "strategy": kind, "workers": workers}
                    found = team.order(order)
                    seconds = max(one["seconds"] for one in found)
                    speeds[kind, workers] = found[0]["rows"] / seconds
            best = max(speeds, key=lambda key: speeds[key])
            chosen = speeds.get((strategy, count), 0.0)
            part = chosen / speeds[best]
            right += part >= RIGHT
            rows.append(
                [
                    name,
                    f"{strategy.removeprefix('kerasdist.')}, {count}",
                    f"{chosen:.0f}",
                    f"{best[0].removeprefix('kerasdist.')}, {best[1]}",
                    f"{speeds[best]:.0f}",
                    f"{part:.2f}",
                ]
            )
            print(rows[-1], file=sys.stderr, flush=True)
            report.data[name] = {f"{k[0]}, {k[1]}": v for k, v in speeds.items()}
    heads = ["situation", "advised, workers", "rows/s", "fastest", "rows/s", "part"]
    report.add(table(heads, rows))
    report.add(f"Right in {right} of {len(rows)} situations.")
    report.write()


if __name__ == "__main__":
    main()
