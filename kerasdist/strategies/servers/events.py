"""The events of other workers, recorded and logged."""

from __future__ import annotations

import logging

from kerasdist.ps import Event
from kerasdist.transport.log import background_log


class EventLog:
    """Records events of workers, and reports them in the log, since the others go on.

    Args:
        events: The list to append to.
    """

    def __init__(self, events: list[Event]) -> None:
        self._events = events

    def __call__(self, event: Event) -> None:
        """Record an event."""
        self._events.append(event)
        _log_event(event)


def _log_event(event: Event) -> None:
    if event.kind == "lost":
        background_log.log(
            logging.WARNING,
            "kerasdist: rank %d (%s) was lost at step %d: %s. The others go on.",
            event.rank,
            event.address,
            event.clock,
            event.reason,
        )
    elif event.kind == "joined":
        background_log.log(
            logging.WARNING,
            "kerasdist: rank %d (%s) is waiting; it joins at the end of an epoch.",
            event.rank,
            event.address,
        )
