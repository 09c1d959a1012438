"""An elastic job of one worker: the next start continues it, with one or several.

Its worker can't be lost without the job, and no other can join. So of all that
`kerasdist.collectives.elastic` does there's only SIGTERM, at which `fit` writes a
checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from kerasdist.collectives.communicator import Communicator
from kerasdist.collectives.elastic.communicator import MembershipChange
from kerasdist.collectives.elastic.connect import name_job
from kerasdist.collectives.elastic.leaving import LEAVE_SECONDS, SAVE_SECONDS
from kerasdist.collectives.elastic.termination import Termination
from kerasdist.transport.liveness.announcements import Announcements


class ConnectedAlone(Protocol):
    """The one worker of a job, whether or not there are servers."""

    @property
    def cluster(self) -> Any:
        """The cluster with this worker's rank."""

    @property
    def communicator(self) -> Communicator:
        """The communicator of one rank."""

    @property
    def replicas(self) -> tuple[int, ...]:
        """The number of its replicas."""

    @property
    def has_servers(self) -> bool:
        """Whether there are parameter servers."""

    @property
    def announcements(self) -> Announcements | None:
        """The chief's announcements, which no other worker reads."""

    def close(self, error: BaseException | None = None) -> None:
        """Leave; release what it holds. Can be called twice."""


class JobAlone:
    """The job of one worker, in the place of an `ElasticJob`.

    Args:
        inner: The worker; owned from now on.
        grace: Seconds from SIGTERM until the platform kills the process.

    Attributes:
        name: The name of the job in this script, the same with several workers.
        facts: What the job knows about its start.
        membership: It never changes.
        leaving: The end of the job at SIGTERM.
    """

    def __init__(self, inner: ConnectedAlone, grace: float) -> None:
        self._inner = inner
        self._closed = False
        self.name = name_job(inner.cluster).partition(".")[2]
        self.facts: dict[str, Any] = {}
        self.leaving = LeavingAlone(Termination.acquire(grace))
        self.membership = MembershipAlone(self.leaving)

    @property
    def communicator(self) -> Communicator:
        """See `ConnectedAlone.communicator`."""
        return self._inner.communicator

    @property
    def replicas(self) -> tuple[int, ...]:
        """See `ConnectedAlone.replicas`."""
        return self._inner.replicas

    @property
    def has_servers(self) -> bool:
        """See `ConnectedAlone.has_servers`."""
        return self._inner.has_servers

    @property
    def announcements(self) -> Announcements | None:
        """See `ConnectedAlone.announcements`."""
        return self._inner.announcements

    def close(self, error: BaseException | None = None) -> None:
        """See `ConnectedAlone.close`."""
        if self._closed:
            return
        self._closed = True
        if self.leaving.termination is not None:
            self.leaving.termination.release()
        self._inner.close(error)


class LeavingAlone:
    """The end of a job of one worker at SIGTERM, see `elastic.leaving.Leaving`.

    Args:
        termination: The request to end this process; None: there will be none.

    Attributes:
        termination: See above.
        ids: The members that leave: this worker, as soon as it has agreed.
    """

    ends_job = includes_this_worker = True

    def __init__(self, termination: Termination | None) -> None:
        self.termination = termination
        self.ids: frozenset[int] = frozenset()

    @property
    def wanted(self) -> bool:
        """Whether the worker wants to leave."""
        return self.termination is not None and self.termination.requested

    def agree(self) -> None:
        """Find out that this worker leaves, and take the time for it."""
        self.ids = frozenset({0})
        self._extend(SAVE_SECONDS)

    def change(self) -> bool:
        """Leave; return that this worker has left."""
        self._extend(LEAVE_SECONDS)
        return True

    def _extend(self, seconds: float) -> None:
        if self.termination is not None:
            self.termination.extend(seconds)


class MembershipAlone:
    """A membership that never changes; see `_keras.protocols.ElasticHooks`.

    Args:
        leaving: The end of the job.
    """

    is_fixed = True
    epoch = finished = finished_before = 0
    joining = is_newcomer = False
    changes: Sequence[MembershipChange] = ()

    def __init__(self, leaving: LeavingAlone) -> None:
        self._leaving = leaving

    def ask(self) -> tuple[bool, bool]:
        """See `ElasticHooks.ask`."""
        return False, self._leaving.wanted

    def publish(self, name: str, value: Any) -> None:
        """See `ElasticHooks.publish`: no other process is there."""

    def facts_of_members(self) -> dict[str, Any] | None:
        """See `ElasticHooks.facts_of_members`."""
        return None

    def admit(self) -> bool:
        """See `ElasticHooks.admit`."""
        return False

    def expecting(
        self, replicas: Sequence[int]
    ) -> contextlib.AbstractContextManager[None]:
        """See `ElasticHooks.expecting`."""
        del replicas
        return contextlib.nullcontext()

    def join(self) -> None:
        """See `ElasticHooks.join`: this worker is a member."""

    def finish_joining(self) -> None:
        """See `ElasticHooks.finish_joining`."""

    @contextlib.contextmanager
    def section(self) -> Iterator[None]:
        """See `ElasticHooks.section`."""
        yield

    def has_changed(self, error: BaseException) -> bool:
        """See `ElasticHooks.has_changed`."""
        del error
        return False
