"""The way in which the members of an epoch are connected: directly, or by servers.

An elastic job uses one `Link` for all of its epochs. `WorkerLink` connects the members
as those of any other job; servers have a link of their own (`kerasdist.ps.elastic`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.collectives.communicator import Communicator
from kerasdist.collectives.connect import connect
from kerasdist.transport.cancellation import Cancellation
from kerasdist.transport.liveness.announcements import Announcements
from kerasdist.transport.timeouts import Timeouts

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
    """The way in which the members of an epoch are connected."""

    @property
    def has_servers(self) -> bool:
        """Whether parameter servers connect the members."""

    def connect(
        self,
        cluster: Cluster,
        epoch: int,
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
            epoch: The epoch's number.
            name: A name for the epoch, the same on all members and used once.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerLink:
    """Connects members directly with each other.

    Attributes:
        transport: See `connect.connect`.
        settings: See `connect.connect`.
        host: See `connect.connect`.
    """

    transport: str
    settings: dict[str, Any]
    host: str | None
    has_servers = False

    def connect(
        self,
        cluster: Cluster,
        epoch: int,
        *,
        name: str,
        timeouts: Timeouts,
        replicas: int,
        watch: Callable[[errors.CollectiveError], None],
        stop: Cancellation,
    ) -> Connected:
        """See `Link.connect`."""
        return connect(
            cluster,
            transport=self.transport,
            timeouts=timeouts,
            replicas=replicas,
            settings=self.settings,
            host=self.host,
            name=name,
            watch=watch,
            stop=stop,
        )

    def leave(self, group: Connected, error: BaseException | None) -> None:
        """See `Link.leave`: `Connected.close` reports it to the others."""


def elastic_timeouts(timeouts: Timeouts) -> Timeouts:
    """Return the time limits of an elastic job: it notices losses sooner."""
    heartbeat = min(timeouts.heartbeat, _MOST_HEARTBEAT)
    return dataclasses.replace(timeouts, heartbeat=heartbeat)
