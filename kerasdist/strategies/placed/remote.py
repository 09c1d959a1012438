"""Devices of other workers: the chief drives them, the other workers serve.

    C: rank 0, the chief      W: every other rank

    1. all   meet (`transport.rendezvous.startup`), which names missing workers
    2. W     starts TensorFlow's server, on a port that the system chooses
       C     starts its own, from which workers fetch their inputs
       all   restrict it to the task's address (`transport.rendezvous.bind`)
    3. all   exchange the addresses of their servers
    4. all   dial each other's servers, and exchange which can't be reached
    5. C     connects TensorFlow to all servers: their devices have names here
    6. W     serves until C has left, then its process ends

TensorFlow alone begins with 5., and waits without a deadline or a message for servers
that don't answer: that weren't started, whose port another process has taken in the
meantime, or that are behind a firewall. It has no heartbeats either: the session's
failure detector notices a lost worker, and ends all waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any, NoReturn

import tensorflow as tf

from kerasdist import _tf, errors
from kerasdist._tf import patches, remote
from kerasdist.cluster import Cluster
from kerasdist.cluster.address import split_address
from kerasdist.collectives import connect, gather_json
from kerasdist.collectives.communicator import copy_to_raise
from kerasdist.collectives.connect import Job
from kerasdist.strategies.options import close_at_exit, forget
from kerasdist.transport.deadline import Deadline, Timeouts, daemon, in_daemon
from kerasdist.transport.liveness.announcements import disconnect
from kerasdist.transport.rendezvous.bind import (
    narrow,
    on_free_port,
    report_unprotected,
    require_word,
)
from kerasdist.transport.rendezvous.waiting_notice import why_unreachable

_LOG = logging.getLogger("kerasdist")
# Seconds to open a connection to a server that is listening.
_DIAL_SECONDS = 20.0
# Seconds between two attempts to end waits for a lost worker.
_SEVER_SECONDS = 0.1
# Seconds that a worker's process may take to end when its job is over.
_EXIT_SECONDS = 20
# Seconds between two checks of the job's state, while TensorFlow connects.
_LOOK_SECONDS = 0.1
# Seconds to wait for the verdict on a loss that TensorFlow has noticed first.
_VERDICT_SECONDS = 5.0
_GONE = (
    tf.errors.UnavailableError,
    tf.errors.CancelledError,
    tf.errors.AbortedError,
    tf.errors.DeadlineExceededError,
    tf.errors.UnknownError,
)


class _Driving:
    """The cluster that this process drives: TensorFlow can be connected to only one."""

    devices: RemoteDevices | None = None


class RemoteDevices:
    """The chief's side: this process can use the devices of all workers.

    Args:
        job: The connected workers.
        names: Each worker's task, `"/job:worker/replica:0/task:1"`, by rank.
        servers: Addresses of their servers, by rank.

    Attributes:
        job: The connected workers.
        names: The tasks, by rank.
    """

    def __init__(self, job: Job, names: Sequence[str], servers: Sequence[str]) -> None:
        self.job = job
        self.names = tuple(names)
        self._servers = tuple(servers)
        self._left = threading.Event()
        daemon("kerasdist-devices", self._watch).start()

    @property
    def communicator(self) -> Any:
        """See `StrategyJob`."""
        return self.job.communicator

    def failure(self, error: BaseException) -> errors.CollectiveError | None:
        """Return the lost worker behind TensorFlow's error; None for another cause.

        Waits, if necessary, until the workers agree on which one was lost.
        """
        known = self.job.failure
        if known is None and isinstance(error, _GONE):
            rank = self._named_in(str(error))
            if rank is not None:
                said = str(error).partition("\n")[0]
                known = self.job.explain(rank, f"TensorFlow can't reach it ({said})")
        return None if known is None else copy_to_raise(known)

    def close(self, error: BaseException | None = None) -> None:
        """Let the workers end. Can be called twice.

        Args:
            error: The exception that ended this worker's script, if any.
        """
        self._left.set()
        self.job.close(error)
        forget(self)

    def _named_in(self, text: str) -> int | None:
        """Return the rank of the worker that a message of TensorFlow names, if any."""
        found = named_in(text, self.names, self._servers)
        return 1 if found is None and len(self.names) == 2 else found

    def _watch(self) -> None:
        failure = self.job.await_end()
        if failure is None:
            return
        remote.end_calls()
        ranks = range(1, len(self._servers))
        if isinstance(failure, errors.WorkerLost) and failure.rank:
            ranks = range(failure.rank, failure.rank + 1)
        # Repeatedly: TensorFlow dials a frozen machine again, which accepts connections
        # because its kernel still runs.
        while not self._left.wait(_SEVER_SECONDS):
            for rank in ranks:
                disconnect(self._servers[rank])


def named_in(text: str, names: Sequence[str], servers: Sequence[str]) -> int | None:
    """Return the rank that a message of TensorFlow names; None: none other than 0."""
    for rank in range(1, len(names)):
        # `task:1` is a prefix of `task:12`, and so are some ports of others.
        either = "|".join(map(re.escape, (names[rank], servers[rank])))
        if re.search(rf"(?:{either})(?!\d)", text):
            return rank
    return None


def rendezvous(place: Cluster, timeouts: Timeouts) -> RemoteDevices:
    """Let the chief use all workers' devices. Doesn't return on other workers.

    They serve until the chief has left; then their processes end, with code 0, or
    with the exception that has ended the job.

    Args:
        place: This task's place in the cluster; with at least two workers.
        timeouts: How long each phase may take.

    Returns:
        The devices; the existing ones, if this process drives the same cluster.

    Raises:
        ClusterError: This process has driven another cluster, or the same one before;
            or the user hasn't allowed TensorFlow's servers.
        StartupError: Workers are missing, or can't be reached; they are named.
        AddressInUseError, AuthenticationError, WorkerLost: See `errors`.

    After an error in step 5, this process can't use TensorFlow any more.
    """
    driven = _Driving.devices
    if place.rank is None:
        raise errors.ClusterError(
            "ModelParallelStrategy has no parameter servers. Received: a task of type "
            f"{place.task_type!r} from {place.source}. Start only 'chief' and 'worker' "
            "tasks."
        )
    if driven is not None:
        if driven.job.cluster == place and not driven._left.is_set():
            return driven
        raise errors.ClusterError(
            "A process can drive the devices of one cluster, once: TensorFlow can't be "
            f"connected to another. Received: workers={place.workers}; before: "
            f"{driven.job.cluster.workers}. Keep the first strategy open, or start new "
            "processes."
        )
    require_word(os.environ, "ModelParallelStrategy on several workers")
    in_use = _tf.in_use()
    job = connect(
        place,
        transport="tcp",
        timeouts=timeouts,
        settings={"strategy": "ModelParallelStrategy"},
    )
    try:
        names, servers = _start(job, Deadline(timeouts.startup), in_use)
        if place.rank == 0:
            driven = RemoteDevices(job, names, servers)
            _Driving.devices = driven
            close_at_exit(driven)
            return driven
    except BaseException as error:
        job.close(error)
        raise
    _serve_until_the_end(job)


def _start(job: Job, deadline: Deadline, in_use: bool) -> tuple[list[str], list[str]]:
    """Run steps 2 to 5; return the tasks' names and servers' addresses, by rank."""
    ring, place = job.communicator, job.cluster
    tasks = _tasks(place)
    kind, index = tasks[ring.rank]
    hosts = [split_address(address)[0] for address in place.workers]
    remote.reach_directly(hosts)
    host = hosts[ring.rank]
    host = f"[{host}]" if ":" in host else host
    if ring.rank == 0:
        if in_use:
            _LOG.warning(
                "kerasdist: TensorFlow was used before the strategy was created. Its "
                "devices are renamed now: variables, datasets and functions that were "
                "created before can't be used any more. Create the strategy first."
            )
        mine = _open(kind, index, host)
    else:
        _Serving.server, port = remote.serve_devices(kind, index, host)
        mine = f"{host}:{port}"
    _LOG.warning("kerasdist: %s", report_unprotected(mine, narrow(mine), os.environ))
    servers = gather_json(ring, mine)
    _dial_all(job, servers)
    names = [f"/job:{kind}/replica:0/task:{index}" for kind, index in tasks]
    if ring.rank == 0:
        cluster: dict[str, dict[int, str]] = {}
        for (kind_of, number), server in zip(tasks, servers, strict=True):
            cluster.setdefault(kind_of, {})[number] = server
        patches.install("remote")
        _connect(job, lambda: remote.drive_devices(cluster, kind, index), deadline)
    ring.barrier()
    return names, servers


class _Serving:
    """TensorFlow's server of this process, which can't be stopped."""

    server: Any = None


def _tasks(place: Cluster) -> list[tuple[str, int]]:
    """Return the type and index of each worker's task, by rank."""
    has_chief = place.task_type == "chief" or place.rank != place.task_index
    first = [("chief", 0)] if has_chief else []
    return [*first, *(("worker", i) for i in range(place.size - len(first)))]


def _open(kind: str, index: int, host: str) -> str:
    """Start the chief's own server on a free port; return its address."""

    def listen(port: int) -> None:
        remote.open_to_workers(kind, index, f"{host}:{port}")

    return f"{host}:{on_free_port(listen, tf.errors.UnknownError)}"


def _dial_all(job: Job, servers: Sequence[str]) -> None:
    """Run step 4: dial all servers.

    Raises:
        StartupError: On all ranks, if one of them can't reach another's server.
    """
    ring = job.communicator
    found = {
        str(rank): reason
        for rank, address in enumerate(servers)
        if rank != ring.rank
        and (reason := why_unreachable(address, _DIAL_SECONDS)) is not None
    }
    missing: dict[int, str] = {}
    for rank, reasons in enumerate(gather_json(ring, found)):
        for other, reason in reasons.items():
            missing.setdefault(int(other), f"from rank {rank}: {reason}")
    if not missing:
        return
    # A last collective, so that no worker leaves before all have reached this point.
    with contextlib.suppress(errors.CollectiveError):
        ring.barrier()
    lines = [
        f"  rank {rank} ({servers[rank]}): {reason}"
        for rank, reason in sorted(missing.items())
    ]
    raise errors.StartupError(
        "The workers have met, but TensorFlow's servers, through which the chief "
        "uses their devices, can't be reached:\n"
        + "\n".join(lines)
        + "\nEach listens on a port of its own, which the system chooses: does a "
        "firewall or a network policy allow connections between the workers on all "
        "ports?",
        missing,
    )


def _connect(job: Job, drive: Any, deadline: Deadline) -> None:
    """Run step 5, with a deadline.

    Raises:
        StartupError: It took too long.
        WorkerLost: A worker was lost meanwhile.
    """
    # TensorFlow doesn't return while a server is silent.
    connecting = in_daemon("kerasdist-connect", drive)
    while wait([connecting], _LOOK_SECONDS).not_done:
        if job.failure is not None:
            raise copy_to_raise(job.failure)
        if deadline.expired:
            raise errors.StartupError(
                "TensorFlow didn't connect to the workers' servers within "
                f"{deadline.seconds:g} s, although all of them were started and "
                "reachable. Is one of their machines overloaded? A longer "
                "`startup_timeout=` gives them more time."
            )
    error = connecting.exception()
    if error is None:
        return
    # If a worker was lost, the failure detector reports it in a moment.
    patience = Deadline(min(_VERDICT_SECONDS, deadline.remaining()))
    while isinstance(error, tf.errors.OpError) and not patience.expired:
        if job.failure is not None:
            raise copy_to_raise(job.failure) from error
        time.sleep(_LOOK_SECONDS)
    raise error


def _serve_until_the_end(job: Job) -> NoReturn:
    failure = job.await_end(0)
    # TensorFlow's threads may be in an operation that waits for a lost worker: this
    # process must end regardless of them.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_EXIT_SECONDS)
    job.close(failure)
    if failure is not None:
        raise copy_to_raise(failure)
    sys.exit(0)
