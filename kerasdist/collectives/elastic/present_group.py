"""The present group of a job, which one thread changes and others wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kerasdist import errors
from kerasdist.collectives.elastic.groups import Group, Result
from kerasdist.collectives.failures import copy_to_raise
from kerasdist.collectives.ops import Array

# The epoch of a worker that isn't a member yet.
NO_EPOCH = -1


class PresentGroup:
    """The group on which collectives run; none while the members change.

    Args:
        group: The first one.
        patience: Seconds that a change of membership may take.
    """

    def __init__(self, group: Group, patience: float) -> None:
        self._patience = patience
        self._changed = threading.Condition()
        # Of the thread that changes groups; None while there is no group.
        self._group: Group | None = group
        self._fetched: Result | None = None
        self._stopped: errors.CollectiveError | None = None

    @property
    def stopped(self) -> errors.CollectiveError | None:
        """The error that ended this worker's part in the job, or None."""
        with self._changed:
            return self._stopped

    def is_usable(self, group: Group) -> bool:
        """Return whether a group is the present one."""
        with self._changed:
            return self._group is group

    def suspend(self) -> None:
        """End the running collective; there is no group until `resume`."""
        with self._changed:
            group, self._group = self._group, None
            self._changed.notify_all()
        if group is not None:
            group.job.abandon()

    def resume(self, group: Group, take_over: Callable[[], None]) -> None:
        """Continue with a new group, unless `stop` was called.

        Args:
            group: The group.
            take_over: Called before another thread gets it.
        """
        with self._changed:
            if self._stopped is None:
                self._group = group
                take_over()
            self._changed.notify_all()

    def stop(self, error: errors.CollectiveError) -> None:
        """End all collectives, now and later, with an error."""
        with self._changed:
            self._stopped = self._stopped or error
            group, self._group = self._group, None
            self._changed.notify_all()
        if group is not None:
            group.job.abandon(error)

    def wait(self, after: int, seconds: float | None = None) -> Group:
        """Wait until there is a group of an epoch after `after`; return it.

        Raises:
            CollectiveError: There will be none.
        """
        seconds = self._patience if seconds is None else seconds
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._stopped is None:
                if self._group is not None and self._group.epoch > after:
                    return self._group
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    self._stopped = errors.CollectiveTimeout(
                        "The workers didn't agree in time on which of them continue. "
                        f"Received: no agreement within {seconds:g} s. Can all "
                        "hosts reach each other? Start the job again."
                    )
                    break
                self._changed.wait(remaining)
            raise copy_to_raise(self._stopped)

    # The result of a collective that others have finished.

    def keep(self, fetched: Result) -> None:
        """Keep the result of the collective that ended unfinished here.

        Others have finished it. The next group may change again before it is used.
        """
        with self._changed:
            self._fetched = fetched

    def take_fetched(self, number: int) -> list[Array] | None:
        """Return the result of a collective if it was kept, and forget it."""
        with self._changed:
            fetched, self._fetched = self._fetched, None
        if fetched is None or fetched.number != number:
            return None
        return fetched.arrays
