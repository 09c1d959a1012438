"""The restarts of lost workers: how many are left, and when each takes place."""

from __future__ import annotations

from kerasdist.cli.run.spawn import Started

FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0


class Restarts:
    """The schedule of a job's restarts. It starts nothing itself.

    Args:
        most: Number of restarts, of all workers together.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self._at: dict[Started, float] = {}

    def schedule(self, worker: Started, now: float) -> float | None:
        """Schedule a restart; return the pause before it in seconds.

        Args:
            worker: The worker that has ended.
            now: The monotonic time.

        Returns:
            None if no restart is left.
        """
        if self.used >= self.most:
            return None
        self.used += 1
        # A worker that ends soon after each start must not keep the machine busy.
        pause = min(FIRST_PAUSE * 2 ** min(worker.incarnation, 10), _LONGEST_PAUSE)
        self._at[worker] = now + pause
        return pause

    @property
    def pending(self) -> bool:
        """Whether a worker is still to be started again."""
        return bool(self._at)

    def next_in(self, now: float) -> float | None:
        """Return the seconds until the next restart; None if there is none."""
        return max(0.0, min(self._at.values()) - now) if self._at else None

    def take_due(self, now: float) -> list[Started]:
        """Return each worker that is to be started again now, once."""
        due = [worker for worker, at in self._at.items() if at <= now]
        for worker in due:
            del self._at[worker]
        return due

    def forget(self, worker: Started) -> None:
        """Leave out a worker, which is started again for another reason."""
        self._at.pop(worker, None)

    def cancel(self) -> list[Started]:
        """Start nothing any more; return the workers that were to be started."""
        waiting = list(self._at)
        self._at.clear()
        return waiting
