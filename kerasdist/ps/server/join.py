"""The admission of late-joining workers at epoch boundaries.

    j: a new process with a lost worker's rank    v: the others    s: server 0

    1. j -> s   registers; the others don't wait for it yet (`WorkerRecord.joining`)
    2. j -> s   the number of its `fit`; waits
    3. v -> s   a barrier between two epochs, with facts of v's training
    4. s -> j   the facts, and the barrier's number
       s -> v   the ranks that joined: they are waited for from the next collective on

The other servers wait for a joiner from its first collective on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kerasdist import errors
from kerasdist.ps.membership import Membership, WorkerRecord
from kerasdist.transport.deadline import Deadline

# Seconds that a joiner's request waits at the server before it is sent again.
_WAIT_SECONDS = 2.0


class JoinBarrier:
    """Admits joining workers at one server. All under `Membership.changed`.

    Args:
        membership: The workers.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        # The waiting workers with the number of their `fit`; the replies to those that
        # were admitted.
        self._waiting: dict[int, tuple[WorkerRecord, int]] = {}
        self._entered: dict[str, dict[str, Any]] = {}
        self._fit = 0
        self._last: tuple[int, list[int]] = (0, [])

    def enter(
        self, worker: WorkerRecord, fit: int, deadline: Deadline
    ) -> dict[str, Any] | None:
        """Wait for the next join barrier, in the request of a joiner.

        Args:
            worker: The joiner.
            fit: Number of the `fit` that it is in, from 1.
            deadline: Of the request.

        Returns:
            "met", "ranks" and "facts" of the barrier; None: it has to wait longer.

        Raises:
            CollectiveError: It can't join any more; the job's failure.
        """
        members = self._membership
        with members.changed:
            if not worker.joining and worker.incarnation not in self._entered:
                raise errors.CollectiveError(
                    f"{self._restarted(worker)} Start this worker again."
                )
            self._waiting[worker.rank] = worker, fit
            members.changed.wait_for(
                lambda: not worker.joining or self._why_not(worker, fit),
                min(_WAIT_SECONDS, deadline.remaining()),
            )
            if self._waiting.get(worker.rank, (None,))[0] is worker:
                del self._waiting[worker.rank]
            if members.failure is not None:
                raise members.failure
            if not worker.joining:
                return self._entered.pop(worker.incarnation)
            why = self._why_not(worker, fit)
        if why:
            raise errors.CollectiveError(why)
        return None

    def admit(self, number: int, ranks: list[int], facts: Mapping[str, Any]) -> None:
        """Admit the waiting workers, when the others have reached the barrier.

        Args:
            number: Number of this collective.
            ranks: The ranks that take part; those that join are added.
            facts: The others' facts; "fit" is the number of their `fit`.
        """
        fit = facts.get("fit")
        self._fit = fit if isinstance(fit, int) else self._fit
        joined = [
            worker
            for worker, theirs in self._waiting.values()
            if theirs == self._fit and self._is_here(worker)
        ]
        names = [worker.rank for worker in joined]
        ranks[:] = sorted([*ranks, *names])
        self._last = number, names
        for worker in joined:
            worker.joining = False
            del self._waiting[worker.rank]
            self._entered[worker.incarnation] = {
                "met": number,
                "ranks": list(ranks),
                "facts": dict(facts),
            }

    def joined_at(self, number: int) -> list[int]:
        """Return the ranks that joined at this barrier, if it was the last one."""
        return self._last[1] if self._last[0] == number else []

    def _is_here(self, worker: WorkerRecord) -> bool:
        return (
            self._membership.workers[worker.rank] is worker and worker.state == "live"
        )

    def _restarted(self, worker: WorkerRecord) -> str:
        return f"This server was restarted while {worker} was joining."

    def _why_not(self, worker: WorkerRecord, fit: int) -> str:
        members = self._membership
        if members.failure is not None or not self._is_here(worker):
            return f"{worker} was lost."
        if not any(not each.joining for each in members.live()):
            return (
                f"{worker} is too late to join: all others have finished or are lost."
            )
        if self._fit > fit:
            return (
                f"{worker} is too late to join: it is in `fit` number {fit} of its "
                f"script, the others are in number {self._fit}. A worker can join in "
                "the same `fit` only."
            )
        return ""
