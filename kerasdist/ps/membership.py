"""The workers of a job as one server knows them.

    expected ──> live ──> finished
                 │  ▲
                 │  └──── away        (the server was restarted, the worker isn't back)
                 ▼         │
                lost <─────┘          lost ──> live   (a new process with the same rank)

In "async" the others go on without a lost worker. In "sync" it is the job's failure,
which ends every wait.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from kerasdist import errors

__all__ = ["Event", "Membership", "WorkerRecord"]


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a worker.

    Attributes:
        kind: "joined" (a new process with a lost worker's rank), "lost", "finished" or
            "returned" (after a restart of the server).
        rank: The worker.
        address: Its address.
        clock: The last step that it had finished; 0 without a table.
        reason: What was seen, without a full stop.
    """

    kind: str
    rank: int
    address: str
    clock: int
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """The event as a JSON object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Event:
        """Return the event that `to_json` wrote.

        Raises:
            ProtocolError: It isn't one.
        """
        try:
            return cls(
                str(value["kind"]),
                int(value["rank"]),
                str(value["address"]),
                int(value["clock"]),
                str(value["reason"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            raise errors.ProtocolError(
                f"An event is damaged. Received: {value!r}."
            ) from None


@dataclasses.dataclass
class WorkerRecord:
    """One worker.

    Attributes:
        rank: Its rank.
        address: Its address in the cluster.
        incarnation: Which process it is: a random text.
        replicas: Number of its replicas.
        state: See the drawing in the module's docstring.
        met: Number of the last collective that it took part in, or has to skip.
        clock: The last step that it has finished, for messages.
        returned: Whether it has been here before a restart of the server.
        joining: Whether it waits to join the others, who don't wait for it yet.
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

    def __str__(self) -> str:
        """For instance `rank 2 (10.0.0.3:2222)`."""
        return f"rank {self.rank} ({self.address})"


class Membership:
    """All workers of a job.

    Args:
        size: Number of workers.
        mode: "sync" or "async".

    Attributes:
        changed: Guards everything here, and what waits for it: notified at each change.
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
        """Those who are waited for: live, away, and expected, by rank."""
        return [p for p in self.workers if p.state in ("live", "away", "expected")]

    def missing(self) -> list[int]:
        """The ranks that have never come."""
        return [p.rank for p in self.workers if p.state == "expected"]

    @property
    def over(self) -> bool:
        """Whether there is nobody left to serve."""
        return not self.live()

    def current(self, rank: int, incarnation: str) -> WorkerRecord | None:
        """The worker of this rank if it's live and this very process."""
        worker = self.workers[rank]
        same = worker.incarnation == incarnation
        return worker if same and worker.state == "live" else None

    def enter(self, worker: WorkerRecord, kind: str | None) -> None:
        """A process has come with a rank; it replaces who had it before.

        Args:
            worker: The worker; live from now on.
            kind: The event that it is; None at the start of the job.
        """
        with self.changed:
            worker.state = "live"
            self.workers[worker.rank] = worker
            if kind is not None:
                self._tell(Event(kind, worker.rank, worker.address, worker.clock))
            self.changed.notify_all()

    def lose(self, worker: WorkerRecord, reason: str) -> bool:
        """A worker is lost; False if it was no longer here."""
        with self.changed:
            if self.workers[worker.rank] is not worker or worker.state not in (
                "live",
                "away",
            ):
                return False
            worker.state = "lost"
            self._tell(Event("lost", worker.rank, worker.address, worker.clock, reason))
            if self._mode == "sync":
                self.fail(
                    errors.WorkerLost(worker.rank, worker.address, worker.clock, reason)
                )
            self.changed.notify_all()
            return True

    def finish(self, worker: WorkerRecord, reason: str) -> None:
        """A worker has left in good order."""
        with self.changed:
            if self.workers[worker.rank] is not worker or worker.state != "live":
                return
            worker.state = "finished"
            self._tell(
                Event("finished", worker.rank, worker.address, worker.clock, reason)
            )
            self.changed.notify_all()

    def fail(self, error: errors.CollectiveError) -> errors.CollectiveError:
        """The job has failed; return its first failure."""
        with self.changed:
            if self.failure is None:
                self.failure = error
                for call in self.on_failure:
                    call(error)
                self.changed.notify_all()
            return self.failure

    def _tell(self, event: Event) -> None:
        for call in self.on_event:
            call(event)
