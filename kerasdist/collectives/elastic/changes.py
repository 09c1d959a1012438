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
    """

    text: str
    before: int
    workers: int
    seconds: float
