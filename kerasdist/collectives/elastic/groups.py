"""The group of an epoch: its members, connected, with what some of them still lack."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.collectives.communicator import Communicator, gather_json
from kerasdist.collectives.connect import connect
from kerasdist.collectives.elastic.epochs import Decision, Member
from kerasdist.collectives.elastic.peer_messenger import PeerMessenger
from kerasdist.collectives.row_exchange import Array
from kerasdist.transport.deadline import Cancellation, Timeouts
from kerasdist.transport.liveness.announcements import Announcements

# The way in which the members of an epoch are connected: directly, as those of any
# other job, or by servers. An elastic job with servers uses one `Link` for all of its
# epochs (`kerasdist.parameter_server.elastic_link`).

# Seconds of silence after which a process is lost, at most.
_MOST_HEARTBEAT = 5.0

# The errors of a group that is broken, and of one that was abandoned.
BROKEN = (errors.WorkerLost, errors.ServerLost, errors.TransportClosed)


class CannotConnect(Exception):
    """No members can be connected any more, whichever they are.

    Args:
        error: The reason.
    """

    def __init__(self, error: errors.CollectiveError) -> None:
        super().__init__(str(error))
        self.error = error


class Connected(Protocol):
    """The connected members of an epoch; see `connect.Job`."""

    @property
    def communicator(self) -> Communicator:
        """The communicator of the members."""

    @property
    def transport(self) -> str:
        """The name of the transport."""

    @property
    def replicas(self) -> tuple[int, ...]:
        """Each member's number of replicas, by rank."""

    @property
    def servers(self) -> tuple[str, ...]:
        """The names of the servers that connect the members; empty without servers."""

    @property
    def failure(self) -> errors.CollectiveError | None:
        """The first failure, or None; doesn't wait."""

    @property
    def announcements(self) -> Announcements | None:
        """The chief's announcements; None for one member."""

    def abandon(self, error: errors.CollectiveError | None = None) -> None:
        """End all waits of this member at once. Doesn't wait."""

    def close(self, error: BaseException | None = None) -> None:
        """Leave; release sockets, threads and memory. Can be called twice."""


class Link(Protocol):
    """The connection of the members of an epoch by parameter servers."""

    def connect(
        self,
        cluster: Cluster,
        *,
        name: str,
        timeouts: Timeouts,
        replicas: int,
        watch: Callable[[errors.CollectiveError], None],
        stop: Cancellation,
    ) -> Connected:
        """Connect the members of an epoch.

        Args:
            cluster: The members, with this one's rank.
            name: A name for the epoch, the same on all members and used once. It ends
                in the epoch's number.
            timeouts: The time limits.
            replicas: Number of this worker's replicas.
            watch: Called with the group's failure, from another thread.
            stop: When another thread sets it, the call ends with `Aborted`.

        Raises:
            CannotConnect: No members can be connected any more.
            KerasDistError: See `connect.connect`.
        """

    def leave(self, group: Connected, error: BaseException | None) -> None:
        """Report that this worker leaves the job, before it closes the group.

        Args:
            group: The last group, which may be broken.
            error: The error that ended its script, if there was one.
        """


def elastic_timeouts(timeouts: Timeouts) -> Timeouts:
    """Return the time limits of an elastic job: it notices losses sooner."""
    heartbeat = min(timeouts.heartbeat, _MOST_HEARTBEAT)
    return dataclasses.replace(timeouts, heartbeat=heartbeat)


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """The result of a collective.

    Attributes:
        number: The collective's number in the job, over all epochs.
        arrays: What it returned.
    """

    number: int
    arrays: list[Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """The connected members of an epoch.

    Attributes:
        epoch: Its number.
        members: They, by rank in the group.
        job: Their connections.
    """

    epoch: int
    members: tuple[Member, ...]
    job: Connected

    @property
    def communicator(self) -> Communicator:
        """Between the members."""
        return self.job.communicator

    def member(self, error: errors.CollectiveError) -> Member | None:
        """Return the member that an error names; None if it names none."""
        if isinstance(error, errors.WorkerLost) and error.rank < len(self.members):
            return self.members[error.rank]
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Connector:
    """Connects the members of an epoch.

    Attributes:
        me: This worker.
        cluster: The cluster of the job.
        addresses: Each task's address, by the member's id.
        session: The name of the job, the same on all members.
        direct: Connects members without servers: `connect.connect`, with its options.
        link: Connects them with servers; None: there are none.
        timeouts: The time limits of the first epoch.
        replicas: Number of this worker's replicas.
    """

    me: Member
    cluster: Cluster
    addresses: Mapping[int, str]
    session: str
    direct: Callable[..., Connected]
    link: Link | None
    timeouts: Timeouts
    replicas: int

    def alone(self) -> Group:
        """Return the group of this worker alone, which isn't an epoch's."""
        cluster = dataclasses.replace(
            self.cluster, rank=0, size=1, workers=(self.addresses[self.me.id],)
        )
        return Group(-1, (self.me,), connect(cluster, replicas=self.replicas))

    def group(
        self,
        decision: Decision,
        timeouts: Timeouts,
        watch: Callable[[errors.CollectiveError], None],
        stop: Cancellation,
    ) -> Group:
        """Connect the members of a decision's epoch.

        Args:
            decision: The decision.
            timeouts: The time limits.
            watch: Called with the group's failure, from another thread.
            stop: When another thread sets it, the call ends with `Aborted`.

        Raises:
            As `Link.connect`.
        """
        members, number = decision.epoch.members, decision.epoch.number
        cluster = dataclasses.replace(
            self.cluster,
            rank=members.index(self.me),
            size=len(members),
            workers=tuple(self.addresses[member.id] for member in members),
        )
        join = self.direct if self.link is None else self.link.connect
        job = join(
            cluster,
            name=f"{self.session}.{number}",
            timeouts=timeouts,
            replicas=self.replicas,
            watch=watch,
            stop=stop,
        )
        return Group(number, members, job)


def introduce(group: Group, decision: Decision, lines: PeerMessenger) -> None:
    """Exchange the names of the members' processes, and of those of absent members.

    A newcomer has never been in contact with an absent one. By its name it knows that
    it is dead if another process has its address. All members of the epoch call it.

    Args:
        group: The group of the new epoch.
        decision: The decision by which it began.
        lines: This member's lines.
    """
    first = group.communicator.rank == 0
    names = lines.names(decision.epoch.absent if first else ())
    for theirs in gather_json(group.communicator, names):
        lines.learn(theirs)


def catch_up(group: Group, decision: Decision, kept: Result | None) -> Result | None:
    """Give the result of the last collective to the members that lack it.

    All members of the epoch call it, first of all. At most one collective was finished
    by some, and not by all.

    Args:
        group: The group of the new epoch.
        decision: The decision by which it began.
        kept: The result of this member's last collective, if there was one.

    Returns:
        The result, if this member lacks it.
    """
    epoch, verdict = decision.epoch, decision.verdict
    old = [member for member in epoch.members if member not in epoch.newcomers]
    if all(member in verdict.furthest for member in old):
        return None
    communicator, root = group.communicator, group.members.index(verdict.furthest[0])
    arrays = []
    if communicator.rank == root and kept is not None:
        arrays = kept.arrays
    forms = [[array.dtype.name, list(array.shape)] for array in arrays]
    forms = gather_json(communicator, forms)[root]
    if communicator.rank != root:
        arrays = [np.empty(shape, np.dtype(name)) for name, shape in forms]
    found = communicator.broadcast(arrays, root) if arrays else []
    if group.members[communicator.rank] in verdict.furthest:
        return None
    return Result(verdict.progress, found)
