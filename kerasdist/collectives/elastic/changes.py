"""The changes of an elastic job's members, as this worker has seen them."""

from __future__ import annotations

import dataclasses

__all__ = ["Change"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the members.

    Attributes:
        text: A sentence about it.
        before: The number of workers before it.
        workers: The number of workers after it.
        seconds: The time without a group, on this worker.
        agreed: When the members were decided, in seconds of the system's clock.
        connected: When they were connected.
    """

    text: str
    before: int
    workers: int
    seconds: float
    agreed: float
    connected: float

    @property
    def began(self) -> float:
        """The time at which training was suspended."""
        return self.connected - self.seconds
