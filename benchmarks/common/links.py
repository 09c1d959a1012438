"""Hosts out of network namespaces, and the links between them."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from common.places import ROOT, cluster_env, quiet_env
from common.processes import Driver, Team

__all__ = ["bytes_sent", "make_hosts", "shape", "start_on_hosts"]


def make_hosts(count: int = 2) -> Any:
    """Return hosts, a context manager; ends the benchmark where none can be."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from hosts import Hosts

    if reason := Hosts.available():
        sys.exit(f"This benchmark can't run here: {reason}.")
    return Hosts(count)


def shape(hosts: Any, rate: int) -> None:
    """Let each host send no faster than a rate, in bits per second."""
    # A burst of a millisecond, or of some packets.
    burst = str(max(rate // 8000, 20_000))
    limit = ["tbf", "rate", f"{rate}bit", "burst", burst, "latency", "1000ms"]
    for host in range(len(hosts.names)):
        tc = [*hosts.prefix(host), "tc", "qdisc", "replace", "dev", "eth0", "root"]
        subprocess.run([*tc, *limit], check=True)


def bytes_sent(hosts: Any) -> int:
    """Return how many bytes host 0 has sent, by the counter of its interface."""
    done = subprocess.run(
        [*hosts.prefix(0), "cat", "/sys/class/net/eth0/statistics/tx_bytes"],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout)


def start_on_hosts(
    driver: Driver,
    hosts: Any,
    name: str,
    command: Sequence[str],
    env: Mapping[str, str],
    place: int = 0,
    python: str = sys.executable,
) -> Team:
    """Start a job with one worker on each host.

    Args:
        driver: Starts the processes.
        hosts: The hosts.
        name: Of the column.
        command: Of each process; the rank follows it, then the number of workers.
        env: What is special about their environment.
        place: A number of this job's own, for its ports.
        python: That of another environment.
    """
    size = len(hosts.names)
    port = 5000 + 100 * place
    addresses = [f"{hosts.address(host)}:{port + host}" for host in range(size)]
    secret = secrets.token_hex(32)
    return driver.start(
        name,
        lambda rank: [*hosts.prefix(rank), python, *command, str(rank), str(size)],
        size,
        lambda rank: {**quiet_env(), **cluster_env(addresses, rank, secret), **env},
    )
