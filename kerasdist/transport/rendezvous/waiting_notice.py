"""Log lines about tasks that a start-up is still waiting for.

Other tasks may be started by hand, or be queued by a cluster: without a line in the log
a job that waits looks like one that hangs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from kerasdist.transport.deadline import Deadline
from kerasdist.transport.log.background_log import log

__all__ = ["FIRST_SECONDS", "WaitingNotice"]

# Workers of one job may take this long to import TensorFlow one after another.
FIRST_SECONDS = 15.0
_AGAIN_SECONDS = 60.0


class WaitingNotice:
    """Logs the missing tasks, from time to time.

    Args:
        me: The name of this task, for instance "rank 0".
    """

    def __init__(self, me: str) -> None:
        self._me = me
        self._began = time.monotonic()
        self._next = self._began + FIRST_SECONDS

    def report(self, missing: Sequence[str], deadline: Deadline) -> None:
        """Log the tasks that are missing, if that is due. Never waits.

        Args:
            missing: Their names, with their addresses.
            deadline: Until when they are waited for.
        """
        now = time.monotonic()
        if not missing or now < self._next:
            return
        self._next = now + _AGAIN_SECONDS
        some = ", ".join(missing[:4])
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        log(
            logging.WARNING,
            "kerasdist: %s has been waiting for %s%s for %.0f s, and continues for at "
            "most %.0f s (`startup_timeout`). Are they started? `kerasdist doctor` "
            "shows which tasks can be reached.",
            self._me,
            some,
            more,
            now - self._began,
            deadline.remaining(),
        )
