"""The start of this worker's part in an elastic job.

    no other task answers that the job runs    this worker is one of those that start it
    another one does                           this worker is to join, by `join`

A worker that isn't among those with which the job starts joins later. So does one whose
task had another process before, which others know.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import threading
import time
from typing import Any

from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.collectives.communicator import Communicator
from kerasdist.collectives.connect import connect
from kerasdist.collectives.elastic.communicator import ElasticCommunicator
from kerasdist.collectives.elastic.epochs import Member
from kerasdist.collectives.elastic.groups import (
    Connector,
    Group,
    Link,
    elastic_timeouts,
)
from kerasdist.collectives.elastic.job import ElasticJob
from kerasdist.collectives.elastic.peer_messenger import (
    PeerMessenger,
    Startup,
    discover_members,
)
from kerasdist.collectives.elastic.termination import Leaving, Termination
from kerasdist.transport.deadline import Deadline, Timeouts
from kerasdist.transport.liveness.announcements import Announcements
from kerasdist.transport.liveness.failure_protocol import EndedTasks
from kerasdist.transport.rendezvous.listener import Listener
from kerasdist.transport.tls import checked_secret

# An elastic job of one worker: the next start continues it, with one or several.
#
# Its worker can't be lost without the job, and no other can join. So of all that
# `kerasdist.collectives.elastic` does there's only SIGTERM, at which `fit` writes a
# checkpoint.


class JobAlone:
    """The job of one worker, in the place of an `ElasticJob`.

    Args:
        inner: The worker, see `strategies.options.StrategyJob`; owned from now on.
        grace: Seconds from SIGTERM until the platform kills the process.

    Attributes:
        name: The name of the job in this script, the same with several workers.
        communicator, replicas, has_servers, announcements: See `StrategyJob`.
        facts: What the job knows about its start.
        membership: The changes of the workers; there are none.
        leaving: The end of the job at SIGTERM.
    """

    def __init__(self, inner: Any, grace: float) -> None:
        self._inner = inner
        self._closed = False
        self.name = name_job(inner.cluster).partition(".")[2]
        self.communicator: Communicator = inner.communicator
        self.replicas: tuple[int, ...] = inner.replicas
        self.has_servers: bool = inner.has_servers
        self.announcements: Announcements | None = inner.announcements
        self.facts: dict[str, Any] = {}
        self.leaving = Leaving(
            inner.communicator, Termination.acquire(grace), 1, lambda: None
        )
        peers = dict(enumerate(self.communicator.peers))
        self.membership = ElasticCommunicator(
            Group(0, (Member(0),), inner), peers, 0.0, is_fixed=True
        )
        self.membership.wants_to_leave = lambda: self.leaving.wanted

    def close(self, error: BaseException | None = None) -> None:
        """Leave the job; release what it holds. Can be called twice."""
        if self._closed:
            return
        self._closed = True
        if self.leaving.termination is not None:
            self.leaving.termination.release()
        self._inner.close(error)


# Seconds between two questions of a worker that waits for the job to run.
_AGAIN_SECONDS = 0.3
# Part of the start's time-out within which it is found out whether the job runs.
_SURVEY_SHARE = 0.5
# Seconds for finding the others, if they have started without this worker.
_JOIN_SECONDS = 60.0

_counts: dict[str, itertools.count[int]] = {}
_counts_lock = threading.Lock()


def connect_elastic(
    cluster: Cluster,
    *,
    transport: str = "auto",
    timeouts: Timeouts | None = None,
    replicas: int = 1,
    settings: dict[str, Any] | None = None,
    min_workers: int = 1,
    start_workers: int | None = None,
    grace: float = 30.0,
    needs: tuple[str, ...] = (),
    link: Link | None = None,
) -> ElasticJob:
    """Connect the workers of the cluster, to continue without those that are lost.

    A worker that the others start without, or have lost, is to join them later.

    Args:
        cluster: See `connect`.
        transport: "auto", "shared_memory", "tcp" or "hierarchical".
        timeouts: See `connect`. A worker is lost after 5 s of silence, or less.
        replicas: See `connect`.
        settings: See `connect`.
        min_workers: The smallest number of workers that continue.
        start_workers: The number of workers with which the job starts, the first ones;
            the others join later. None: all of them.
        grace: Seconds from SIGTERM until the platform kills a process.
        needs: The names of the facts that a worker needs which joins later.
        link: Connects the members of each epoch with parameter servers; by default
            they are connected directly, with the transport and settings that are given.

    Raises:
        As `connect`. After an exception nothing is left open.
    """
    timeouts = elastic_timeouts(timeouts or Timeouts())
    rank = cluster.rank or 0
    size = cluster.size if start_workers is None else start_workers
    connector = Connector(
        me=Member(rank),
        cluster=cluster,
        addresses=dict(enumerate(cluster.workers)),
        session=name_job(cluster),
        direct=functools.partial(
            connect,
            transport=transport,
            settings={"elastic": min_workers, "start": size, **(settings or {})},
        ),
        link=link,
        timeouts=timeouts,
        replicas=replicas,
    )
    secret = checked_secret(cluster.workers, os.environ)
    members = tuple(Member(number) for number in range(size))
    deadline = Deadline(timeouts.startup)
    joins = rank >= size
    while True:
        with contextlib.ExitStack() as undo:
            address = cluster.workers[rank]
            listener = Listener.acquire(address, secret, timeouts.startup)
            undo.callback(listener.release)
            lines, hosts = _enter(
                connector, secret, listener, deadline, needs, joins=joins
            )
            undo.callback(lines.close)
            startup = None
            if not hosts:
                ended = EndedTasks().read
                startup = Startup(lines.me, members, lines, timeouts, ended)
            job = ElasticJob(
                dataclasses.replace(connector, me=lines.me),
                listener,
                lines,
                min_workers,
                hosts,
                startup,
                grace,
            )
            undo.pop_all()
        try:
            job.begin()
        except BaseException:
            job.close()
            if not job.excluded:
                raise
            # The others have started without this process.
            joins = True
            deadline = Deadline(max(deadline.remaining(), _JOIN_SECONDS))
        else:
            return job


def _enter(
    connector: Connector,
    secret: bytes,
    listener: Listener,
    deadline: Deadline,
    needs: tuple[str, ...],
    *,
    joins: bool,
) -> tuple[PeerMessenger, tuple[Member, ...]]:
    """Find out whether this worker starts with the others, or is to join them.

    Args:
        connector: The settings of this worker.
        secret: The job's secret.
        listener: This worker's listener.
        deadline: Until when the others are waited for.
        needs: See `connect_elastic`.
        joins: Whether it is certain that it is to join.

    Returns:
        The worker's lines, and the members that are to admit it: none if it starts with
        them.

    Raises:
        StartupError: The job that it is to join doesn't run by the deadline, or the
            others have left it.
    """
    addresses, session = connector.addresses, connector.session
    me = connector.me
    if joins:
        # Larger than that of any earlier process with this task.
        me = Member(me.id, int(time.time() * 1000))
    lines = PeerMessenger(me, addresses, secret, listener, session)
    if not joins:
        lines.patience = deadline
    try:
        while True:
            share = 1.0 if joins else _SURVEY_SHARE
            limit = Deadline(share * deadline.remaining())
            found = discover_members(lines, members=joins, deadline=limit)
            if not joins and found.shows_a_job:
                break
            if found.left and not found.answers and not found.unclear:
                raise _left(session, found.left)
            if not joins:
                return lines, ()
            for answer in found.answers:
                if answer.members and all(name in answer.facts for name in needs):
                    lines.facts = answer.facts
                    return lines, answer.members
            if deadline.expired:
                raise _no_job(me.id, addresses[me.id], deadline.seconds)
            time.sleep(_AGAIN_SECONDS)
    except BaseException:
        lines.close()
        raise
    lines.close()
    return _enter(connector, secret, listener, deadline, needs, joins=True)


def _no_job(rank: int, address: str, seconds: float) -> errors.StartupError:
    reason = "it is to join a job that runs, and found none"
    return errors.StartupError(
        f"This worker is to join a job that runs. Received: no answer of a running "
        f"worker to rank {rank} ({address}) within {seconds:.3g} s. Look at the output "
        "of the others, run `kerasdist doctor` where they run, or give them more time "
        "with `startup_timeout=`.",
        {rank: reason},
    )


def _left(session: str, ranks: list[int]) -> errors.StartupError:
    number = job_number(session)
    return errors.StartupError(
        "The other workers have left the job in which this worker is to take part. "
        f"Received: ranks {sorted(ranks)} run, but have closed elastic strategy "
        f"{number} of this script. A worker that is started again runs the script from "
        "its beginning, so each elastic strategy has to stay open until the script "
        "ends: keep a reference to it, and don't close it before.",
        dict.fromkeys(sorted(ranks), "it has closed the strategy"),
    )


def name_job(cluster: Cluster) -> str:
    """Name the n-th elastic job of this process on this cluster, alike on all ranks."""
    digest = hashlib.sha256(",".join(cluster.workers).encode()).hexdigest()[:16]
    with _counts_lock:
        # Threads may play several ranks in tests.
        count = _counts.setdefault(f"{digest} {cluster.rank}", itertools.count(1))
        return f"{digest}.elastic{next(count)}"


def job_number(name: str) -> int:
    """Return the n of a name that `name_job` made, or of one of its epochs."""
    return int(name.split(".")[1].removeprefix("elastic"))
