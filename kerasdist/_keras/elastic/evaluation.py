"""The test and the predict function of a job whose workers may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kerasdist._keras.context import setting
from kerasdist._keras.elastic.batches import is_of_fit
from kerasdist._keras.elastic.state.finished_calls import refuse_newcomer
from kerasdist._keras.protocols import ElasticHooks, KerasHooks, WorkerHooks
from kerasdist._tf.marks import PREDICTING_EPOCH

# Calls that are begun again after a change of the workers.


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


def test_function(
    trainer: Any, hooks: KerasHooks, make: Callable[[], Callable[[Any], Any]]
) -> Callable[[Any], Any]:
    """Return a test function that is made for each layout of the replicas.

    `evaluate` is begun again as a whole. `test_on_batch`, whose metrics are reset
    before, is repeated here.

    Args:
        trainer: The model.
        hooks: The hooks of its strategy.
        make: Makes a function for the present layout.
    """
    calls = ByLayout(hooks.workers, make)

    def call(iterator: Any) -> Any:
        if is_of_fit(iterator):
            return calls(iterator)
        refuse_newcomer(hooks, "test_on_batch")
        batches = list(iterator)

        def test() -> Any:
            trainer.reset_metrics()
            return calls(iter(batches))

        with setting(evaluating=True):
            return repeated(hooks.elastic, test)

    return call


def renew_prediction(trainer: Any, hooks: KerasHooks) -> None:
    """Let the predict function be made again if it was for other workers."""
    if hooks.elastic is None:
        return
    if PREDICTING_EPOCH.get(trainer) != hooks.elastic.epoch:
        trainer.predict_function = None
        PREDICTING_EPOCH.set(trainer, hooks.elastic.epoch)
