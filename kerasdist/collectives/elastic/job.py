"""An elastic job: its present group, the agreement on the next one, and the change."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import logging
import os
import threading
import time
from typing import Any

from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.collectives.elastic.agreement import Agreement
from kerasdist.collectives.elastic.changes import Change
from kerasdist.collectives.elastic.chief_actions import ElasticChiefActions
from kerasdist.collectives.elastic.communicator import ElasticCommunicator
from kerasdist.collectives.elastic.groups import Connector, Group, catch_up
from kerasdist.collectives.elastic.leaving import Leaving
from kerasdist.collectives.elastic.lines import Lines
from kerasdist.collectives.elastic.termination import Termination
from kerasdist.transport.base import Peer
from kerasdist.transport.liveness.launcher_pipe import Reporter
from kerasdist.transport.log import background_log
from kerasdist.transport.membership.epochs import (
    Decision,
    Member,
    StopReason,
    first_decision,
)
from kerasdist.transport.rendezvous.listener import Listener
from kerasdist.transport.timeouts import Timeouts
from kerasdist.transport.wire.secret import job_secret

__all__ = ["ElasticJob", "connect_elastic"]

# Seconds of silence after which a worker is lost, at most.
_MOST_HEARTBEAT = 5.0
# Seconds for connecting the members of a new epoch, which all live.
_CONNECT_SECONDS = 15.0
# Times the heartbeat's time-out: without an agreement for so long this worker stops.
_AGREE_FACTOR = 6.0
# Seconds that a change may take, with members that are lost meanwhile.
_CHANGE_SECONDS = 180.0

_counts: dict[str, itertools.count[int]] = {}
_counts_lock = threading.Lock()


class ElasticJob:
    """The workers of a strategy, which continue without those that are lost.

    Made by `connect_elastic`. It implements `agreement.Follower`.

    Attributes:
        cluster: The cluster with this worker's rank at the start.
        communicator: Between the present members.
        announcements: The present chief's announcements.
        transport: The transport of the first group, see `connect`.
        timeouts: The timeouts as given.
        facts: Numbers that all members know, and a process gets which joins.
        leaving: The members that leave the job.
    """

    has_servers = False

    def __init__(
        self,
        connector: Connector,
        group: Group,
        listener: Listener,
        lines: Lines,
        min_workers: int,
        hosts: tuple[Member, ...] = (),
        grace: float = 30.0,
    ) -> None:
        self.cluster = connector.cluster
        self.transport = group.job.transport
        self.timeouts = connector.timeouts
        self.facts = lines.facts
        self._connector = connector
        self._listener = listener
        self._lock = threading.Lock()
        self._group = group
        self._decision: Decision | None = None
        self._began = 0.0
        # Members without the job's state, and the last collective that was finished.
        self._newcomers: tuple[Member, ...] = ()
        self._reached = 0
        self._lost: errors.WorkerLost | None = None
        self._closed = False
        peers = {
            member_id: Peer(member_id, address)
            for member_id, address in connector.addresses.items()
        }
        self.communicator = ElasticCommunicator(group, peers, _CHANGE_SECONDS, hosts)
        self.leaving = Leaving(
            self.communicator, Termination.acquire(grace), min_workers
        )
        self.announcements = ElasticChiefActions(
            self.communicator.await_group, self.timeouts.collective
        )
        self._agreement = Agreement(
            connector.me,
            None if hosts else first_decision(group.members),
            lines,
            min_workers,
            _AGREE_FACTOR * self.timeouts.heartbeat,
            self.timeouts.heartbeat,
            self,
        )
        self.communicator.membership = self._agreement
        self._reporter = Reporter(connector.session, connector.me.id)
        if not hosts:
            self._tell(group, 0.0)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Each present worker's number of replicas, by rank."""
        return self.communicator.replicas

    # What the agreement calls, see `agreement.Follower`.

    def suspend(self) -> None:
        """See `agreement.Follower.suspend`."""
        self._began = self._began or time.monotonic()
        self.communicator.suspend()

    def install(self, decision: Decision) -> None:
        """See `agreement.Follower.install`: connects in a thread of its own.

        A member may be lost while it runs. Then the agreement decides the next epoch,
        and this one's group, if there will be one, isn't used.
        """
        progress = decision.verdict.progress.step
        if progress > self._reached:
            # They have finished a collective with the others, and get the state next.
            self._newcomers = ()
        self._reached = progress
        self._newcomers = (
            *(each for each in self._newcomers if each in decision.epoch.members),
            *decision.epoch.newcomers,
        )
        self._decision = decision
        threading.Thread(
            target=self._change,
            args=(decision, time.time()),
            name="kerasdist-change",
            daemon=True,
        ).start()

    def stop(self, reason: StopReason, missing: tuple[int, ...]) -> None:
        """See `agreement.Follower.stop`."""
        lost = self._lost
        absent = f" Out of contact: ranks {list(missing)}." if missing else ""
        if self.communicator.joining:
            lost = errors.WorkerLost(
                self._connector.me.id,
                self._connector.addresses[self._connector.me.id],
                self.communicator.step,
                "the job that it was to join has ended",
            )
        elif lost is None and reason is StopReason.TOO_FEW and self.leaving.ids:
            first = min(self.leaving.ids)
            lost = errors.WorkerLost(
                first,
                self._connector.addresses[first],
                self.communicator.step,
                f"it was preempted, and {reason.value}",
            )
        elif lost is None:
            lost = errors.WorkerLost(
                self._connector.me.id,
                self._connector.addresses[self._connector.me.id],
                self.communicator.step,
                f"{reason.value}.{absent}".rstrip("."),
            )
        else:
            lost = errors.WorkerLost(
                *(lost.rank, lost.host, lost.step),
                f"{lost.reason}, and {reason.value}.{absent}".rstrip("."),
            )
        self.communicator.stop(lost)

    # The change of groups.

    def watch(self, epoch: int, error: errors.CollectiveError) -> None:
        """Follow the failure of an epoch's group, from that group's threads."""
        group = self._group
        if group.epoch == epoch:
            self._note(group, error)
            self._agreement.lost(epoch, group.member(error))

    def _note(self, group: Group, error: errors.CollectiveError) -> None:
        member = group.member(error)
        if isinstance(error, errors.WorkerLost) and member is not None:
            # By the rank that the worker had at the start.
            self._lost = errors.WorkerLost(
                member.id, error.host, self.communicator.step, error.reason
            )

    def _change(self, decision: Decision, agreed: float) -> None:
        number = decision.epoch.number
        timeouts = dataclasses.replace(self.timeouts, startup=_CONNECT_SECONDS)
        group: Group | None = None
        try:
            group = self._connector.group(
                decision,
                len(self._newcomers),
                timeouts,
                lambda error: self.watch(number, error),
            )
            fetched = catch_up(group, decision, self.communicator.last)
        except Exception as error:
            self._failed(decision, group, error)
            return
        with self._lock:
            old = self._group
            present = self._decision is decision and not self._closed
            if present:
                self._group = group
        if present and fetched is not None:
            present = self._agreement.fetched(number, fetched.number)
        if not present:
            group.job.close()
            return
        failure = group.job.failure
        if failure is not None:
            # It came before `watch` could know the group.
            self.watch(number, failure)
        pause = time.monotonic() - self._began if self._began else 0.0
        self._began = 0.0
        change = self._describe(old, group, pause, agreed)
        self.communicator.changes.append(change)
        self.communicator.resume(group, fetched, decision.verdict.progress.step)
        self._tell(group, pause)
        if group.communicator.rank == 0:
            background_log.log(logging.WARNING, "kerasdist: %s", change.text)
        old.job.close()

    def _failed(
        self, decision: Decision, group: Group | None, error: Exception
    ) -> None:
        """Report why the group of an epoch couldn't be formed."""
        if group is not None:
            group.job.close()
        member = None
        members = decision.epoch.members
        if isinstance(error, errors.WorkerLost) and error.rank < len(members):
            member = members[error.rank]
        elif isinstance(error, errors.StartupError) and error.missing:
            member = members[min(error.missing)]
        elif not isinstance(error, errors.KerasDistError):
            background_log.log(
                logging.ERROR,
                "kerasdist: connecting the workers of epoch %d failed: %r",
                *(decision.epoch.number, error),
            )
        self._agreement.lost(decision.epoch.number, member)

    def _tell(self, group: Group, pause: float) -> None:
        """Report the members to the launcher."""
        ranks = [member.id for member in group.members]
        step = self.communicator.step
        self._reporter.members(group.epoch, ranks, step + 1, pause)

    def _describe(
        self, old: Group, group: Group, pause: float, agreed: float
    ) -> Change:
        error, self._lost = self._lost, None
        missing = _left(old, group)
        left = [member for member in missing if member.id in self.leaving.ids]
        lost = [member for member in missing if member not in left]
        events = [
            (lost, "lost"),
            (left, "preempted, and left"),
            (_left(group, old), "added"),
        ]
        parts = [
            f"{', '.join(self._name_of(member) for member in members)} "
            f"{'were' if len(members) > 1 else 'was'} {verb}"
            for members, verb in events
            if members
        ]
        what = " and ".join(parts) or "connections between the workers were lost"
        reason = "" if error is None or (left and not lost) else f": {error.reason}"
        count = len(group.members)
        verb = "s continue" if count > 1 else " continues"
        return Change(
            text=f"{what} at step {self.communicator.step}{reason}. "
            f"{count} worker{verb} ({pause:.2f} s).",
            before=len(old.members),
            workers=count,
            seconds=pause,
            agreed=agreed,
            connected=time.time(),
        )

    def _name_of(self, member: Member) -> str:
        return f"rank {member.id} ({self._connector.addresses[member.id]})"

    def close(self, error: BaseException | None = None) -> None:
        """Leave the job. Can be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            group = self._group
        if self.leaving.termination is not None:
            self.leaving.termination.release()
        self.communicator.close()
        self._agreement.close()
        group.job.close(error)
        self._listener.release()


def connect_elastic(
    cluster: Cluster,
    *,
    transport: str = "auto",
    timeouts: Timeouts | None = None,
    replicas: int = 1,
    settings: dict[str, Any] | None = None,
    host: str | None = None,
    min_workers: int = 1,
    grace: float = 30.0,
) -> ElasticJob:
    """Connect all workers of the cluster, to continue without those that are lost.

    Args:
        cluster: See `connect`.
        transport: "auto", "shared_memory", "tcp" or "hierarchical".
        timeouts: See `connect`. A worker is lost after 5 s of silence, or less.
        replicas: See `connect`.
        settings: See `connect`.
        host: See `connect`.
        min_workers: The smallest number of workers that continue.
        grace: Seconds from SIGTERM until the platform kills a process.

    Raises:
        As `connect`. After an exception nothing is left open.
    """
    timeouts = timeouts or Timeouts()
    timeouts = dataclasses.replace(
        timeouts, heartbeat=min(timeouts.heartbeat, _MOST_HEARTBEAT)
    )
    rank = cluster.rank or 0
    secret = job_secret(cluster.workers, os.environ)
    addresses = dict(enumerate(cluster.workers))
    name = _name(cluster)
    with contextlib.ExitStack() as undo:
        listener = Listener.acquire(cluster.workers[rank], secret, timeouts.startup)
        undo.callback(listener.release)
        me = Member(rank)
        lines = Lines(me, addresses, secret, listener, name)
        undo.callback(lambda: lines.close())
        answer = lines.running()
        hosts = () if answer is None else answer.members
        if answer is not None:
            # Larger than that of any earlier process with this task.
            me = Member(rank, int(time.time() * 1000))
            lines.close()
            lines = Lines(me, addresses, secret, listener, name)
            lines.facts = answer.facts
        connector = Connector(
            me=me,
            cluster=cluster,
            addresses=addresses,
            session=name,
            transport=transport,
            timeouts=timeouts,
            replicas=replicas,
            settings={"elastic": min_workers, **(settings or {})},
            host=host,
        )
        made: list[ElasticJob] = []

        def watch(error: errors.CollectiveError) -> None:
            for job in made:
                job.watch(0, error)

        if hosts:
            group = connector.alone()
        else:
            members = tuple(Member(number) for number in range(cluster.size))
            group = connector.group(first_decision(members), 0, timeouts, watch)
        undo.callback(group.job.close)
        job = ElasticJob(connector, group, listener, lines, min_workers, hosts, grace)
        made.append(job)
        if group.job.failure is not None:
            job.watch(0, group.job.failure)
        undo.pop_all()
    return job


def _left(before: Group, after: Group) -> list[Member]:
    return [member for member in before.members if member not in after.members]


def _name(cluster: Cluster) -> str:
    """Name the n-th elastic job of this process on this cluster, alike on all ranks."""
    digest = hashlib.sha256(",".join(cluster.workers).encode()).hexdigest()[:16]
    with _counts_lock:
        # Threads may play several ranks in tests.
        count = _counts.setdefault(f"{digest} {cluster.rank}", itertools.count(1))
        return f"{digest}.elastic{next(count)}"
