"""The changes of a job's workers, and the time that they have cost."""

from __future__ import annotations

import time
from typing import Any

from kerasdist._keras.protocols import ElasticHooks, hooks_of
from kerasdist.collectives.elastic.changes import Change


class ElasticView:
    """The changes of the workers during one `fit`.

    Args:
        elastic: The changes.
        clock: Measures this worker's steps.

    Attributes:
        writable: Whether this worker can write the figures, as far as it knows.
    """

    def __init__(self, elastic: ElasticHooks, clock: Any) -> None:
        self.writable = True
        self._elastic = elastic
        self._clock = clock
        self._began = time.monotonic()
        self._lost = clock.lost
        self._pauses = 0.0
        self._epoch = elastic.epoch
        self._seen = len(elastic.changes)

    @classmethod
    def of(cls, model: Any, clock: Any) -> ElasticView | None:
        """Return the view for a model; None if its workers stay the same."""
        hooks = hooks_of(model.distribute_strategy)
        if hooks is None or hooks.elastic is None:
            return None
        return cls(hooks.elastic, clock)

    @property
    def has_changed(self) -> bool:
        """Whether the workers have changed since `take`; alike on all of them."""
        return self._elastic.epoch != self._epoch

    def take(self) -> list[Change]:
        """Return the changes since the last call."""
        self._epoch = self._elastic.epoch
        new = list(self._elastic.changes[self._seen :])
        self._seen += len(new)
        self._pauses += sum(change.seconds for change in new)
        return new

    def state(self) -> list[float]:
        """Return the seconds so far, those of pauses, and those of repeated steps."""
        lost = self._clock.lost - self._lost
        return [time.monotonic() - self._began, self._pauses, lost]

    def adopt(self, state: list[float]) -> None:
        """Continue from another worker's state, before the first step here."""
        seconds, self._pauses, lost = state
        self._began, self._lost = time.monotonic() - seconds, self._clock.lost - lost

    def goodput_percent(self) -> float:
        """Return the useful part of the time so far.

        Pauses, and steps that were begun again, aren't useful.
        """
        seconds = max(time.monotonic() - self._began, 1e-9)
        lost = self._pauses + self._clock.lost - self._lost
        return 100 * max(0.0, 1.0 - lost / seconds)
