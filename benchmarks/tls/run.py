"""What encryption costs: rings and servers over TLS, beside plain TCP.

    make bench-tls

An all-reduce between two workers, and one worker's push and pull at a server. The
processes of both columns are started once and take turns: size by size, column by
column, several rounds of it. A figure is the median over all samples of all rounds. All
processes share one machine and its loopback interface: over a slower network TLS costs
less.

The last table has other ways to encrypt, between two processes with nothing else to do
(streams.py), and the time of OpenSSL alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import Driver, Report, Team, arguments, human_bytes, median, table

RING = str(HERE.parent / "all_reduce" / "player.py")
SERVER = str(HERE.parent / "server_throughput" / "player.py")
SIZES = (1_000, 1_000_000, 64_000_000)
COLUMNS = ("tcp", "tls")
KINDS = {"ring": "All-reduce between 2 workers", "server": "Push and pull of a server"}
CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def certificates(folder: Path) -> str:
    """Make a CA and a certificate; return what KERASDIST_TLS is set to."""

    def openssl(*arguments: str) -> None:
        command = ["openssl", *arguments]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)

    openssl(
        *("req", "-x509", *CURVE, "-days", "2", "-subj", "/CN=CA"),
        *("-keyout", "ca.key", "-out", "ca.pem"),
    )
    openssl(
        *("req", "-new", *CURVE, "-subj", "/CN=task"),
        *("-keyout", "task.key", "-out", "task.csr"),
    )
    openssl(
        *("x509", "-req", "-in", "task.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
        *("-CAcreateserial", "-days", "2", "-out", "task.pem"),
    )
    return ",".join(str(folder / name) for name in ("task.pem", "task.key", "ca.pem"))


def start(driver: Driver, kind: str, column: str, tls: str) -> Team:
    player = RING if kind == "ring" else SERVER
    workers, servers = (2, 0) if kind == "ring" else (1, 1)
    return driver.start_job(
        f"{kind}, {column}",
        [sys.executable, player, "tcp", driver.path],
        workers,
        {"KERASDIST_TLS": tls if column == "tls" else ""},
        servers=servers,
    )


def sample(team: Team, kind: str, size: int, samples: int) -> list[float]:
    """Seconds per call, of the slower rank."""
    calls = max(1, min(100, 2_000_000 // size))
    if kind == "ring":
        order = {"bytes": size, "ranks": 2, "warm": max(2, calls // 10)}
        answers = team.order({**order, "calls": calls, "samples": samples})
        return list(map(max, zip(*answers, strict=True)))
    order = {"do": "run", "bytes": size}
    team.order({**order, "calls": max(2, calls // 10)}, range(1))
    found = []
    for _ in range(samples):
        (answer,) = team.order({**order, "calls": calls}, range(1))
        found.append((answer["ended"] - answer["began"]) / calls)
    return found


# The way of streams.py, and OpenSSL's settings for its processes.
AES_128 = """
openssl_conf = all
[all]
ssl_conf = ssl
[ssl]
system_default = given
[given]
Ciphersuites = TLS_AES_128_GCM_SHA256
"""
WAYS = {
    "plain TCP": ("tcp", ""),
    "kerasdist's socket": ("socket", ""),
    "kerasdist's socket, AES with 128 bits": ("socket", AES_128),
    "memory BIOs, 256 KB in a call": ("memory", ""),
    "memory BIOs, AES with 128 bits": ("memory", AES_128),
    "a connection and a thread for each direction": ("threads", ""),
    "OpenSSL alone, without a socket": ("openssl", ""),
    "OpenSSL alone, AES with 128 bits": ("openssl", AES_128),
}


def streams(folder: Path, tls: str, size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of an exchange of `size` bytes, the ways in turns."""
    settings = folder / "openssl.cnf"
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, (way, text) in WAYS.items():
            settings.write_text(text)
            env = {"OPENSSL_CONF": str(settings)} if text else {}
            done = subprocess.run(
                [sys.executable, str(HERE / "streams.py"), way, str(size), "5"],
                env={**os.environ, "KERASDIST_TLS": tls, **env},
                check=True,
                stdout=subprocess.PIPE,
                timeout=300,
            )
            seconds[name] += json.loads(done.stdout)
    return seconds


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=5, help="in each round")
    options = parser.parse_args()
    sizes, rounds = SIZES, options.rounds
    if options.quick:
        sizes, rounds, options.samples = SIZES[:2], 1, 2
    samples: dict[str, dict[str, dict[int, list[float]]]] = {
        kind: {column: {size: [] for size in sizes} for column in COLUMNS}
        for kind in KINDS
    }
    # Of all processes, in seconds; a ring's warm-up is in it, too.
    cpu = {
        kind: {column: dict.fromkeys(sizes, 0.0) for column in COLUMNS}
        for kind in KINDS
    }
    report = Report(
        "TLS 1.3 beside plain TCP, float32, on loopback addresses",
        options.output,
        ("numpy",),
        repeats=f"{rounds} rounds x {options.samples} samples per figure",
    )
    with tempfile.TemporaryDirectory() as folder, Driver() as driver:
        tls = certificates(Path(folder))
        teams: Any = {
            (kind, column): start(driver, kind, column, tls)
            for kind in KINDS
            for column in COLUMNS
        }
        for size in sizes:
            for column in COLUMNS:
                teams["server", column].order({"do": "prepare", "bytes": size})
        for _ in range(rounds):
            for size in sizes:
                for (kind, column), team in teams.items():
                    before = sum(team.cpu())
                    found = sample(team, kind, size, options.samples)
                    samples[kind][column][size] += found
                    cpu[kind][column][size] += sum(team.cpu()) - before
    with tempfile.TemporaryDirectory() as folder:
        tls = certificates(Path(folder))
        ways = streams(Path(folder), tls, max(sizes), rounds)
    medians = {
        kind: {
            column: {size: median(times) for size, times in by_size.items()}
            for column, by_size in by_column.items()
        }
        for kind, by_column in samples.items()
    }
    report.data["samples"] = samples
    report.data["medians"] = medians
    report.data["cpu"] = cpu
    for kind, title in KINDS.items():
        plain, encrypted = (medians[kind][column] for column in COLUMNS)
        report.add(f"{title}, milliseconds per call, medians:\n")
        rows = [
            [
                human_bytes(size),
                f"{plain[size] * 1e3:.3f}",
                f"{encrypted[size] * 1e3:.3f}",
                f"{encrypted[size] / plain[size]:.2f}",
                f"{2 * size / plain[size] / 1e6:.0f}",
                f"{2 * size / encrypted[size] / 1e6:.0f}",
                f"{cpu[kind]['tls'][size] / max(cpu[kind]['tcp'][size], 0.01):.2f}",
            ]
            for size in sizes
        ]
        head = ["bytes", "TCP", "TLS", "TLS over TCP", "TCP MB/s", "TLS MB/s"]
        head.append("processor time, TLS over TCP")
        report.add(table(head, rows))
    report.add("MB count both ways: the bytes that a worker sends and receives.\n")
    report.data["ways"] = ways
    report.add(f"Two processes, {human_bytes(max(sizes))} each way, medians:\n")
    plain_seconds = median(ways["plain TCP"])
    rows = [
        [name, f"{median(each) * 1e3:.1f}", f"{median(each) / plain_seconds:.2f}"]
        for name, each in ways.items()
    ]
    report.add(table(["way", "ms", "of plain TCP"], rows))
    report.write()


if __name__ == "__main__":
    main()
