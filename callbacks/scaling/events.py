"""The events of a job while it is measured, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_WHAT = {"lost": "was lost", "joined": "joined"}


class Events:
    """Events that haven't been written yet.

    Args:
        known: Events of the strategy that are older than this object.
    """

    def __init__(self, known: Sequence[Any] = ()) -> None:
        self._known = len(known)
        self._ranks: tuple[int, ...] | None = None
        self._texts: list[str] = []

    def add(self, text: str) -> None:
        """Add an event."""
        self._texts.append(text)

    def note_workers(self, events: Sequence[Any], ranks: tuple[int, ...]) -> None:
        """Add an event for each worker that joined or was lost.

        Args:
            events: All events of the strategy.
            ranks: The ranks that train now.
        """
        for event in events[self._known :]:
            why = f": {event.reason}" if event.reason else ""
            self.add(
                f"rank {event.rank} ({event.address}) "
                f"{_WHAT.get(event.kind, event.kind)} at its step {event.clock}{why}"
            )
        self._known = len(events)
        if self._ranks not in (None, ranks):
            workers = "worker trains" if len(ranks) == 1 else "workers train"
            self.add(
                f"{len(ranks)} {workers} from here on: "
                f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            )
        self._ranks = ranks

    def take(self) -> str:
        """Return the events since the last call, as markdown; "" if there are none."""
        text = "\n".join(f"- {one}" for one in self._texts)
        self._texts = []
        return text
