"""The connected workers of a strategy."""

from __future__ import annotations

from typing import Protocol

from kerasdist.collectives import Communicator

__all__ = ["StrategyJob"]


class StrategyJob(Protocol):
    """What a strategy asks of the connected workers, whatever connects them."""

    @property
    def communicator(self) -> Communicator:
        """Between all workers."""

    @property
    def replicas(self) -> tuple[int, ...]:
        """Each worker's number of replicas, by rank."""

    def close(self, error: BaseException | None = None) -> None:
        """Leave the job; say to the others what ended this worker's script."""
