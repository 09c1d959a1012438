"""The membership of a job: the state of its workers at one server.

    expected ──> live ──> finished
                 │  ▲
                 │  └──── away        (the server was restarted, the worker isn't back)
                 ▼         │
                lost <─────┘          lost ──> live   (a new process with the same rank)

In "async" the others continue without a lost worker. In "sync" its loss is the job's
failure, which ends every wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kerasdist import errors
from kerasdist.parameter_server.layout import ServerSettings
from kerasdist.transport.deadline import Timeouts
from kerasdist.transport.framing import Count

# The messages about membership between workers and servers.


@dataclass(frozen=True, kw_only=True)
class WorkerProgress:
    """The progress of one worker.

    Attributes:
        met: Number of the last collective that it has finished.
        clocks: Its clock in each table, by the table's number.
        claims: By dataset the epoch, and the batches that it has claimed last.
        joining: Whether it has started late, and hasn't joined the others.
    """

    met: int = 0
    clocks: Mapping[int, int] = field(default_factory=dict)
    claims: Mapping[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    joining: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a worker.

    Attributes:
        kind: "joined" (a new process with a lost worker's rank), "lost", "finished",
            "left" (it closed a strategy, and may create another one) or "returned"
            (after a restart of the server).
        rank: The worker.
        address: Its address.
        clock: The last step that it had finished; 0 without a table.
        reason: The observed cause, without a full stop.
        use: The number of the strategy that it has left; else 0.
    """

    kind: str
    rank: int
    address: str
    clock: int
    reason: str = ""
    use: int = 0


@dataclass(frozen=True, kw_only=True)
class Successor:
    """The strategy that servers serve next, with other settings.

    Attributes:
        settings: Its settings.
        timeouts: Its time limits.
    """

    settings: ServerSettings
    timeouts: Timeouts


@dataclass(frozen=True, kw_only=True)
class Goodbye:
    """The content of a worker's GOODBYE frame, with which it leaves.

    Attributes:
        reason: In words, without a full stop.
        failed: Whether its script ended with an error.
        cause: The job's failure, if the worker leaves because of it, as
            `failure_protocol.encode` returns it.
        use: The number of the strategy that it leaves, if it stays itself; else 0.
        successor: What its script continues with, at servers with other settings.
    """

    reason: str
    failed: bool = False
    cause: str | None = None
    use: Count = 0
    successor: Successor | None = None


@dataclass(frozen=True, kw_only=True)
class ServerHello:
    """The hello of a worker to a server, beside its rank.

    Attributes:
        line: Whether the connection is for frames about the job, or for requests.
        server: Index of the server that it is for.
        incarnation: A random text that identifies the worker's process.
        replicas: Number of its replicas.
        settings: `ServerSettings.agreed` of the worker.
        met: `ServerRoster.met` of another server, or None.
        join_barrier: Whether to join at an epoch's end, see
            `parameter_server.server.collectives`.
        joining: `ServerRoster.joining` of another server, or None.
        resume: The worker's progress, for a server that was started again.
    """

    line: Literal["control", "data"] = "control"
    server: int
    incarnation: str
    replicas: int
    settings: dict[str, Any]
    met: int | None = None
    join_barrier: bool = False
    joining: bool | None = None
    resume: WorkerProgress | None = None


@dataclass(frozen=True, kw_only=True)
class ServerRoster:
    """The reply of a server to a worker that it admits.

    Attributes:
        host: The identity of the server's host, see `host_key`.
        unix_name: The name of its Unix socket.
        replicas: Each worker's number of replicas, by rank.
        met: Number of the last collective in which this worker doesn't take part.
        joined: Whether the job had begun without it.
        joining: Whether the others don't wait for it yet, see
            `kerasdist.parameter_server.server.collectives`.
        resumed: Whether the server continues from a snapshot.
        seed: Random; the same for all workers, and after the server's restart.
    """

    host: str = ""
    unix_name: str = ""
    replicas: tuple[int, ...]
    met: int
    joined: bool
    joining: bool = False
    resumed: bool = False
    seed: int = 0


@dataclass
class WorkerRecord:
    """One worker.

    Attributes:
        rank: Its rank.
        address: Its address in the cluster.
        incarnation: A random text that identifies its process.
        replicas: Number of its replicas.
        state: See the diagram in the module's docstring.
        met: Number of the last collective that it took part in, or has to skip.
        clock: The last step that it has finished, for messages.
        returned: Whether it was a member before a restart of the server.
        joining: Whether it waits to join the others, which don't wait for it yet.
        use: Number of the newest strategy of it that has sent a request.
        left: Number of the last strategy that it has left: its next one is another use
            of the servers.
        successor: What its script continues with, if it has finished for that.
    """

    rank: int
    address: str = ""
    incarnation: str = ""
    replicas: int = 1
    state: str = "expected"
    met: int = 0
    clock: int = 0
    returned: bool = False
    joining: bool = False
    use: int = 1
    left: int = 0
    successor: Successor | None = None

    def lost(self, reason: str, *, others_go_on: bool = False) -> errors.WorkerLost:
        """Return the error that it is lost."""
        return errors.WorkerLost(
            self.rank, self.address, self.clock, reason, others_go_on
        )

    def __str__(self) -> str:
        """Return its name, for instance `rank 2 (10.0.0.3:2222)`."""
        return f"rank {self.rank} ({self.address})"


class Membership:
    """All workers of a job.

    Args:
        size: Number of workers.
        mode: "sync" or "async".

    Attributes:
        changed: Guards all of this; notified at each change.
        workers: All workers, by rank.
        failure: The job's first failure, or None.
        on_event: Called with each event, under `changed`.
        on_failure: Called once with the job's failure, under `changed`.
    """

    def __init__(self, size: int, mode: str) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.workers = [WorkerRecord(rank) for rank in range(size)]
        self.failure: errors.CollectiveError | None = None
        self.on_event: list[Callable[[Event], None]] = []
        self.on_failure: list[Callable[[errors.CollectiveError], None]] = []
        self._mode = mode

    def live(self) -> list[WorkerRecord]:
        """Return the workers that are waited for: live, away, and expected, by rank."""
        return [p for p in self.workers if p.state in ("live", "away", "expected")]

    @property
    def over(self) -> bool:
        """Whether there is no worker left to serve."""
        return not self.live()

    def current(self, rank: int, incarnation: str) -> WorkerRecord | None:
        """Return the worker of this rank if it's live and this very process."""
        if not 0 <= rank < len(self.workers):
            return None
        worker = self.workers[rank]
        same = worker.incarnation == incarnation
        return worker if same and worker.state == "live" else None

    def is_here(self, worker: WorkerRecord) -> bool:
        """Return whether a worker is live, and no other one has its rank."""
        return self.workers[worker.rank] is worker and worker.state == "live"

    def check(self, worker: WorkerRecord | None = None) -> None:
        """Raise the job's failure, or the end of this worker, if there is one."""
        if self.failure is not None:
            raise self.failure
        if worker is not None and not self.is_here(worker):
            # The thread of a lost worker: this isn't sent to any process.
            raise errors.TransportClosed(f"{worker} was lost.")

    def enter(self, worker: WorkerRecord, kind: str | None) -> None:
        """Add a worker; it replaces the one that had its rank before.

        Args:
            worker: The worker; live from now on.
            kind: The kind of its event; None at the start of the job.
        """
        with self.changed:
            worker.state = "live"
            self.workers[worker.rank] = worker
            if kind is not None:
                self._publish(kind, worker)
            self.changed.notify_all()

    def lose(self, worker: WorkerRecord, reason: str) -> bool:
        """Mark a worker as lost; return False if it was no longer a member."""
        with self.changed:
            if self.workers[worker.rank] is not worker or worker.state not in (
                "live",
                "away",
            ):
                return False
            worker.state = "lost"
            self._publish("lost", worker, reason)
            if self._mode == "sync":
                self.fail(worker.lost(reason))
            return True

    def finish(
        self, worker: WorkerRecord, reason: str, successor: Successor | None = None
    ) -> None:
        """Mark a worker as finished; its script may continue with a successor."""
        with self.changed:
            if not self.is_here(worker):
                return
            worker.state = "finished"
            worker.successor = successor
            self._publish("finished", worker, reason)

    @property
    def successor(self) -> Successor | None:
        """The strategy with which the workers' scripts continue; None: there's none."""
        return next((p.successor for p in self.workers if p.successor), None)

    def note_use(self, worker: WorkerRecord, use: int) -> None:
        """Note the strategy of a worker that sends a request."""
        with self.changed:
            worker.use = max(worker.use, use)

    def leave(self, worker: WorkerRecord, use: int, reason: str) -> None:
        """Note that a worker has closed a strategy, and stays itself."""
        with self.changed:
            if not self.is_here(worker):
                return
            worker.left = max(worker.left, use)
            self._publish("left", worker, reason, use)

    def fail(self, error: errors.CollectiveError) -> errors.CollectiveError:
        """Set the job's failure; return the first one."""
        with self.changed:
            if self.failure is None:
                self.failure = error
                for call in self.on_failure:
                    call(error)
                self.changed.notify_all()
            return self.failure

    def _publish(
        self, kind: str, worker: WorkerRecord, reason: str = "", use: int = 0
    ) -> None:
        event = Event(kind, worker.rank, worker.address, worker.clock, reason, use)
        for call in self.on_event:
            call(event)
        self.changed.notify_all()
