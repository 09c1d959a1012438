"""Where a worker joins that comes later: between two epochs of the others.

    j: a new process with a lost worker's rank    v: the others    s: server 0

    1. j -> s   lets itself in; nobody waits for it yet (`WorkerRecord.joining`)
    2. j -> s   which `fit` it has come to; waits
    3. v -> s   a gate: a barrier between two epochs, with facts of what v do
    4. s -> j   the facts, and the gate's number
       s -> v   who has joined: from the next collective on it is waited for

The other servers wait for a joiner from the first collective on that it comes to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kerasdist import errors
from kerasdist.ps.membership import Membership, WorkerRecord
from kerasdist.transport.deadline import Deadline

__all__ = ["JoinBarrier"]

# How long a server lets a joiner wait before it says that it still has to.
_WAIT_SECONDS = 2.0


class JoinBarrier:
    """Lets workers join at one server. All under `Membership.changed`.

    Args:
        membership: The workers.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        # Who waits, and in which `fit`; what those who were let in are told.
        self._waiting: dict[int, tuple[WorkerRecord, int]] = {}
        self._entered: dict[str, dict[str, Any]] = {}
        self._fit = 0
        self._last: tuple[int, list[int]] = (0, [])

    def enter(
        self, worker: WorkerRecord, fit: int, deadline: Deadline
    ) -> dict[str, Any] | None:
        """A joiner waits for the next gate.

        Args:
            worker: The joiner.
            fit: Number of the `fit` that it has come to, from 1.
            deadline: Of the request.

        Returns:
            "met", "ranks" and "facts" of the gate; None: it has to wait longer.

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
        """The others are at a gate: who waits for it joins.

        Args:
            number: Of this collective.
            ranks: Who has come to it; those who join are added.
            facts: What the others say of themselves; "fit" is the number of theirs.
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
        """Who has joined at the gate with this number, if that was the last one."""
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
                f"{worker} came too late to join: all others have finished or are lost."
            )
        if self._fit > fit:
            return (
                f"{worker} came too late to join: it is in `fit` number {fit} of its "
                f"script, the others are in number {self._fit}. A worker can join in "
                "the same `fit` only."
            )
        return ""
