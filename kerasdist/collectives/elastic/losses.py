"""The losses that a worker has noticed, and the error with which its part ends."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kerasdist import errors
from kerasdist.transport.membership.epochs import Member, StopReason


class Losses:
    """The losses since the last change of the members, as errors.

    Args:
        me: This worker.
        addresses: Each task's address, by the member's id.
    """

    def __init__(self, me: Member, addresses: Mapping[int, str]) -> None:
        self._me = me
        self._addresses = addresses
        self._worker: errors.WorkerLost | None = None
        self._server: errors.ServerLost | None = None

    def note(
        self, member: Member | None, error: errors.CollectiveError, step: int
    ) -> None:
        """Note the failure of a group.

        Args:
            member: The member that it names, if there is one.
            error: The failure.
            step: The present step.
        """
        if isinstance(error, errors.WorkerLost) and member is not None:
            # By the rank that the worker had at the start.
            self._worker = errors.WorkerLost(member.id, error.host, step, error.reason)
        elif isinstance(error, errors.ServerLost):
            self._server = error

    def take(self) -> errors.WorkerLost | errors.ServerLost | None:
        """Return the last loss, of a worker if there was one, and forget all."""
        error = self._worker or self._server
        self._worker = self._server = None
        return error

    def final_error(
        self,
        reason: StopReason,
        missing: tuple[int, ...],
        step: int,
        *,
        joining: bool,
        leavers: Collection[int],
    ) -> errors.WorkerLost:
        """Return the error with which this worker's part in the job ends.

        Args:
            reason: Why it ends.
            missing: The ids of members that are out of contact.
            step: The present step.
            joining: Whether this worker hasn't joined the job yet.
            leavers: The ids of members that leave as they have announced.
        """
        lost = self._worker
        absent = f" Out of contact: ranks {list(missing)}." if missing else ""
        if joining:
            ended = "the job that it was to join has ended"
            return self._error(self._me.id, step, ended)
        if lost is None and reason is StopReason.TOO_FEW and leavers:
            preempted = f"it was preempted, and {reason.value}"
            return self._error(min(leavers), step, preempted)
        text = f"{reason.value}.{absent}".rstrip(".")
        if lost is None:
            return self._error(self._me.id, step, text)
        return errors.WorkerLost(
            *(lost.rank, lost.host, lost.step), f"{lost.reason}, and {text}"
        )

    def _error(self, number: int, step: int, reason: str) -> errors.WorkerLost:
        return errors.WorkerLost(number, self._addresses[number], step, reason)
