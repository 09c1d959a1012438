"""Tasks that were stopped by a signal after all others ended.

While others need a frozen worker they detect it by its silence. One that is stopped
after they have ended well (in `model.save`, for instance) isn't missed by any task:
only the system knows that it isn't just busy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from kerasdist.cli.run.processes import is_stopped
from kerasdist.cli.run.spawn import Started

# Looks in a row, one per second. Counted, not timed: a batch system that suspends the
# whole job for hours stops the launcher, too.
_LOOKS = 10
SECONDS = 1.0


class FrozenTasks:
    """Detects that all tasks of a job that still run are stopped.

    Args:
        tasks: All tasks of the job.
    """

    def __init__(self, tasks: Sequence[Started]) -> None:
        self._tasks = tasks
        self._launcher = os.getppid()
        self._seen = 0
        self._next = 0.0

    @property
    def next_in(self) -> float | None:
        """Seconds until the next call of `found`; None if none is needed."""
        if not self._may_be:
            return None
        return max(0.0, self._next - time.monotonic())

    @property
    def _may_be(self) -> bool:
        ended = [each for each in self._tasks if each.code is not None]
        return 0 < len(ended) < len(self._tasks)

    def found(self) -> list[Started]:
        """Return all running tasks if each has been stopped for several seconds."""
        if not self._may_be or time.monotonic() < self._next:
            return []
        self._next = time.monotonic() + SECONDS
        running = [each for each in self._tasks if each.code is None]
        # After Ctrl-Z the launcher is stopped with the chief; both are resumed later.
        stopped = all(is_stopped(each.process.pid) for each in running)
        self._seen = self._seen + 1 if stopped and not is_stopped(self._launcher) else 0
        return running if self._seen >= _LOOKS else []
