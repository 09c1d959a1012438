"""The doctor's checks of this task's place in its job.

They cover its settings, its secret, its own address (can it listen there?) and its
peers (can they be reached?).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Mapping

from kerasdist.cli.doctor.machine import Finding
from kerasdist.cluster import Cluster, resolve
from kerasdist.cluster.address import split_address
from kerasdist.errors import ClusterError
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.handshake import is_loopback, job_secret, secret_fault
from kerasdist.transport.rendezvous.bind import listen_at
from kerasdist.transport.rendezvous.waiting_notice import why_unreachable

_RETRY_SECONDS = 0.25


def check_cluster(
    environ: Mapping[str, str],
) -> tuple[Cluster | None, list[Finding]]:
    """Resolve the cluster settings; no cluster if they are wrong."""
    try:
        cluster = resolve(environ=environ)
    except ClusterError as error:
        remedy = "correct the settings; on the other workers, too"
        return None, [Finding(level="fault", text=str(error), remedy=remedy)]
    if cluster.source == "none":
        text = (
            "no cluster settings: one worker\nNo other host was looked at: for a job "
            "of `kerasdist run -H` or `--nnodes`, give the doctor these options, too"
        )
        return cluster, [Finding(level="ok", text=text)]
    if cluster.needs_mpi:
        return cluster, _by_mpi(cluster)
    who = f"{cluster.task_type} {cluster.task_index}"
    if cluster.rank is None:
        text = f"this is server {cluster.task_index} of {len(cluster.servers)}"
    else:
        text = f"this is rank {cluster.rank} of {cluster.size} ({who})"
    found = [Finding(level="ok", text=f"{text}, by {cluster.source}")]
    for rank, address in enumerate(cluster.workers):
        found.append(Finding(level="ok", text=f"rank {rank}: {address}"))
    for index, address in enumerate(cluster.servers):
        found.append(Finding(level="ok", text=f"server {index}: {address}"))
    local = [is_loopback(a) for a in (*cluster.workers, *cluster.servers)]
    if any(local) and not all(local):
        found.append(
            Finding(
                level="warn",
                text="some addresses are loopback, others are not: from another "
                "machine, localhost is that machine itself",
                remedy="use the name by which the other machines know this one",
            )
        )
    return cluster, found


def _by_mpi(cluster: Cluster) -> list[Finding]:
    """Check that MPI can connect this process; without starting MPI."""
    text = "a process that PMIx started: only MPI knows its rank"
    if cluster.size > 1:
        text = f"this is rank {cluster.rank} of {cluster.size}, by MPI"
    found = [Finding(level="ok", text=text)]
    if importlib.util.find_spec("mpi4py") is None:
        found.append(
            Finding(
                level="fault",
                text="mpi4py isn't installed, which connects MPI's processes",
                remedy=f"{sys.executable} -m pip install 'kerasdist[mpi]'",
            )
        )
    return found


def check_secret(cluster: Cluster, environ: Mapping[str, str]) -> list[Finding]:
    """Check that there is a secret, or none is needed. It is never shown."""
    fault = secret_fault(environ)
    if fault is not None:
        text, _, remedy = fault.partition(" Set it to ")
        return [Finding(level="fault", text=text, remedy=f"set it to {remedy}")]
    if environ.get("KERASDIST_SECRET"):
        return [Finding(level="ok", text="KERASDIST_SECRET is set")]
    addresses = (*cluster.workers, *cluster.servers)
    try:
        job_secret(addresses, environ)
    except ClusterError:
        return [
            Finding(
                level="fault",
                text="KERASDIST_SECRET isn't set, and the addresses can be reached "
                "from other machines",
                remedy="set it to the same random text on all workers (`openssl rand "
                "-hex 32`), or set KERASDIST_INSECURE=1 on a network that only "
                "this job can reach",
            )
        ]
    if all(is_loopback(address) for address in addresses):
        why = "and isn't needed: no address can be reached from other machines"
        return [Finding(level="ok", text=f"KERASDIST_SECRET isn't set, {why}")]
    return [
        Finding(
            level="warn",
            text="KERASDIST_INSECURE=1: any process that reaches the ports can join "
            "the job",
            remedy="set KERASDIST_SECRET instead, unless only this job can reach the "
            "network",
        )
    ]


@contextlib.contextmanager
def own_port(cluster: Cluster, environ: Mapping[str, str]) -> Iterator[list[Finding]]:
    """Listen at this task's own address, inside the block.

    While the doctor listens, the doctors on the other machines can reach it.
    """
    address = cluster.address
    if address is None:
        yield []
        return
    if environ.get("KERASDIST_LISTEN_FD"):
        yield [Finding(level="ok", text=f"the launcher listens at {address} for us")]
        return
    host, port = split_address(address)
    with contextlib.ExitStack() as stack:
        try:
            servers, elsewhere = listen_at(address)
        except OSError as error:
            found = Finding(
                level="fault",
                text=f"this task can't listen at {address}: {error.strerror}",
                remedy=f"end the process that does (`ss -ltnp 'sport = :{port}'` shows "
                "it; it may be the job itself), or choose another port",
            )
            if error.errno == errno.EACCES:
                found = dataclasses.replace(found, remedy="choose a port above 1023")
            if error.errno == errno.EADDRNOTAVAIL:
                remedy = "use an address of this machine"
                found = dataclasses.replace(found, remedy=remedy)
            yield [found]
            return
        for server in servers:
            stack.enter_context(server)
        if elsewhere:
            yield [
                Finding(
                    level="warn",
                    text=f"port {port} is free, but {host!r} isn't an address of this "
                    "machine",
                    remedy="that is right if it leads here (a Kubernetes service). If "
                    "not, this process has another worker's task index",
                )
            ]
        else:
            yield [Finding(level="ok", text=f"this task can listen at {address}")]


def check_peers(
    cluster: Cluster,
    seconds: float,
    probe: Callable[[str, float], str | None] = why_unreachable,
    names: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Try to reach all peers, at the same time.

    A peer that can't be reached yet is tried again until the time is over, so that the
    doctors of all machines don't have to start in the same moment.

    Args:
        cluster: The peers.
        seconds: How long to try.
        probe: Returns why an address can't be reached within some seconds; None if
            it can.
        names: The peers' names, by address; by default those of their tasks.
    """
    peers = dict(names or {}) or {
        address: f"rank {rank} ({address})"
        for rank, address in enumerate(cluster.workers)
    } | {
        address: f"server {index} ({address})"
        for index, address in enumerate(cluster.servers)
    }
    peers.pop(cluster.address or "", None)
    deadline = Deadline(seconds)
    reasons: dict[str, str | None] = {}
    pause = threading.Event()

    def look(address: str) -> None:
        while True:
            reasons[address] = probe(address, max(deadline.remaining(), 0.01))
            if reasons[address] is None or deadline.remaining() <= _RETRY_SECONDS:
                return
            pause.wait(_RETRY_SECONDS)

    threads = [
        threading.Thread(target=look, args=(address,), daemon=True) for address in peers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        # `probe` keeps its own deadline; this is for one that doesn't.
        thread.join(deadline.remaining() + 1.0)
    silent = f"no answer within {seconds:g} s"
    found = []
    for address, name in peers.items():
        reason = reasons.get(address, silent)
        if reason is None:
            found.append(Finding(level="ok", text=f"{name} accepts connections"))
        else:
            found.append(
                Finding(
                    level="fault",
                    text=f"{name} can't be reached: {reason}",
                    remedy=_remedy(reason),
                )
            )
    return found


def _remedy(reason: str) -> str:
    """Return the remedy for a reason of `why_unreachable`."""
    if "resolve" in reason or "looking up" in reason:
        return "correct the name in the cluster settings, or the name server"
    if "refused" in reason:
        return (
            "start the worker there; before the job, run `kerasdist doctor` on all "
            "machines at the same time (see --timeout): it listens meanwhile"
        )
    return "look at whether that machine is up, and at the firewalls for that port"
