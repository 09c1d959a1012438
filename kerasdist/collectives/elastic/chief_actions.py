"""The announcements of the present chief, which the others wait for.

Each group has announcements of its own. If the chief is lost, those that wait for it
wait for the next group: one of them is the chief there, and has to act itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kerasdist.collectives.elastic.groups import Group
from kerasdist.collectives.elastic.link import BROKEN
from kerasdist.transport.liveness.announcements import Outcome


class ElasticChiefActions:
    """See `ChiefActions`.

    Args:
        group: Returns the present group; or, given an epoch, waits for a later one.
        seconds: See `ChiefActions`.
    """

    def __init__(self, group: Callable[..., Group], seconds: float) -> None:
        self.seconds = seconds
        self._group = group
        # The epochs in which this worker has begun actions, by topic.
        self._begun: dict[str, int] = {}

    @property
    def announces(self) -> bool:
        """See `ChiefActions.announces`."""
        return self._group().communicator.rank == 0

    def begin(self, topic: str) -> None:
        """See `Announcements.begin`."""
        group = self._group()
        self._begun[topic] = group.epoch
        if group.job.announcements is not None:
            group.job.announcements.begin(topic)

    def end(self, topic: str, facts: dict[str, Any], *, failed: bool = False) -> None:
        """See `Announcements.end`."""
        group = self._group()
        begun = self._begun.pop(topic, None)
        if group.job.announcements is None:
            return
        if begun != group.epoch:
            # Those that wait in the new group don't know of it yet.
            group.job.announcements.begin(topic)
        group.job.announcements.end(topic, facts, failed=failed)

    def wait(self, topic: str, *, own: bool = False) -> Outcome:
        """See `Announcements.wait`; "mine": this worker has become the chief.

        Raises:
            CollectiveError: The job can't continue.
        """
        group = self._group()
        while True:
            announcements = group.job.announcements
            if announcements is None or announcements.announces:
                return Outcome(kind="mine")
            try:
                return announcements.wait(topic, own=own)
            except BROKEN:
                group = self._group(group.epoch)
