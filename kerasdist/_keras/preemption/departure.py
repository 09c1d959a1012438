"""The workers of an elastic job that leave it between two steps, on SIGTERM.

    all        ask, about once per second (`joining.Admission`)
    all        agree on which leave ── these leave ── the others take the next step
    a leaver   ends its process as the signal would have

So no step is repeated, unlike after a loss. If too few workers stay, they write a
checkpoint first: see `resumption`.
"""

from __future__ import annotations

import contextlib
from typing import Any

from kerasdist._keras.context import current
from kerasdist._keras.elastic.continuable import ContinuableStep
from kerasdist._keras.files.succession import flush_board
from kerasdist._keras.protocols import KerasHooks
from kerasdist.collectives.elastic.leaving import Leaving
from kerasdist.collectives.elastic.termination import end_process, flush_output


class Departure:
    """The leaving of workers, this one perhaps among them.

    Args:
        trainer: The model.
        hooks: The hooks of its strategy.
    """

    def __init__(self, trainer: Any, hooks: KerasHooks) -> None:
        self._trainer = trainer
        self._hooks = hooks

    def run(self, step: ContinuableStep, iterator: Any, number: int) -> None:
        """Let the workers leave that want to; all call it alike, between two steps.

        Args:
            step: Takes the steps of the model.
            iterator: The iterator of the next step; None: the last epoch has ended.
            number: The number of that step in the epoch.
        """
        leaving = _leaving_of(self._hooks)
        if leaving is None:
            return
        leaving.agree()
        if leaving.ids and leaving.ends_job and current.resumption is not None:
            current.resumption.keep(self._trainer, step, iterator, number)
        if leaving.ids and leaving.change():
            for callback in current.callbacks:
                flush_board(callback)
            self._hooks.workers.job.close()
            flush_output()
            end_process()


def leave_after_training(
    trainer: Any, hooks: KerasHooks, step: ContinuableStep
) -> None:
    """Let the workers leave that want to, at the end of the last epoch of `fit`.

    No step follows that would do it. All workers call it alike.
    """
    if hooks.elastic is not None and hooks.elastic.ask()[1]:
        Departure(trainer, hooks).run(step, None, 0)


def in_fit(hooks: KerasHooks) -> contextlib.AbstractContextManager[None]:
    """Let this worker have the time of a `fit` to leave, in the block."""
    leaving = _leaving_of(hooks)
    if leaving is None or leaving.termination is None:
        return contextlib.nullcontext()
    return leaving.termination.in_fit()


def _leaving_of(hooks: KerasHooks) -> Leaving | None:
    job: Any = hooks.workers.job
    return getattr(job, "leaving", None)
