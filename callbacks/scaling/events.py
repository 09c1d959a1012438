"""What happened to a job while it was measured, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["Events"]

_WHAT = {"lost": "was lost", "joined": "has come"}


class Events:
    """Events that haven't been written yet.

    Args:
        told: Events of the strategy that were there before.
    """

    def __init__(self, told: Sequence[Any] = ()) -> None:
        self._told = len(told)
        self._ranks: tuple[int, ...] | None = None
        self._texts: list[str] = []

    def add(self, text: str) -> None:
        """Something else has happened."""
        self._texts.append(text)

    def note_workers(self, told: Sequence[Any], ranks: tuple[int, ...]) -> None:
        """Tell who has come and gone.

        Args:
            told: All events of the strategy.
            ranks: Who trains now.
        """
        for event in told[self._told :]:
            why = f": {event.reason}" if event.reason else ""
            self.add(
                f"rank {event.rank} ({event.address}) "
                f"{_WHAT.get(event.kind, event.kind)} at its step {event.clock}{why}"
            )
        self._told = len(told)
        if self._ranks not in (None, ranks):
            workers = "worker trains" if len(ranks) == 1 else "workers train"
            self.add(
                f"{len(ranks)} {workers} from here on: "
                f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            )
        self._ranks = ranks

    def take(self) -> str:
        """Return all that wasn't taken before, as markdown; "" if there's nothing."""
        text = "\n".join(f"- {one}" for one in self._texts)
        self._texts = []
        return text
