"""Calls that are begun again after a change of the workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kerasdist._keras.protocols import ElasticHooks, WorkerHooks


class ByLayout:
    """A function that is made for each layout of the replicas.

    Args:
        workers: The workers and their replicas.
        make: Makes it for the present layout.
    """

    def __init__(
        self, workers: WorkerHooks, make: Callable[[], Callable[[Any], Any]]
    ) -> None:
        self._workers = workers
        self._make = make
        self._made: dict[Any, Callable[[Any], Any]] = {}

    def __call__(self, argument: Any) -> Any:
        """Call the function for the present layout."""
        layout = self._workers.rank, tuple(self._workers.job.replicas)
        if layout not in self._made:
            self._made[layout] = self._make()
        return self._made[layout](argument)


def repeated(elastic: ElasticHooks | None, call: Callable[[], Any]) -> Any:
    """Return what a call returns whose workers stay the same from beginning to end.

    Args:
        elastic: The changes of membership; None if there are none.
        call: May be called several times, and must begin at the same state itself.
    """
    if elastic is None:
        return call()
    while True:
        try:
            with elastic.section():
                return call()
        except Exception as error:
            if not elastic.has_changed(error):
                raise
