"""Models without a strategy, in a job of several workers.

A model that was created, cloned or loaded outside of the scope is trained by each
worker for itself. That is rarely intended, and nothing else shows it: the chief warns.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kerasdist._keras.context import current, setting
from kerasdist._keras.protocols import KerasHooks, current_hooks, hooks_of
from kerasdist._tf.marks import TRAINED_LOCALLY
from kerasdist._tf.variables import of_tensorflow

# The hooks of strategies that are neither closed nor garbage.
_in_use: weakref.WeakSet[Any] = weakref.WeakSet()


def begin_use(hooks: KerasHooks) -> None:
    """Register a strategy that has been created."""
    _in_use.add(hooks)


def end_use(hooks: KerasHooks) -> None:
    """Unregister a strategy that has been closed; can be called twice."""
    _in_use.discard(hooks)


def is_in_use(hooks: KerasHooks) -> bool:
    """Return whether a strategy can run collectives, because it isn't closed."""
    return hooks in _in_use


@contextlib.contextmanager
def local_training() -> Iterator[None]:
    """Declare that each worker is meant to train models of its own.

        with kerasdist.local_training():
            model.fit(x, y)

    Such a model was created outside of the strategy's scope. Each worker then trains a
    model of its own on all the data that it gets, and saves it where the script does:
    give each rank a file of its own. With a single worker nothing is different.
    """
    with setting(local=True):
        yield


def warn_if_outside(trainer: Any) -> None:
    """Warn, when training begins, if each worker trains a model of its own.

    Warns once per model, on the chief. Models of another `tf.distribute` strategy and
    strategies of one worker aren't concerned.

    Raises:
        ValueError: The training is declared as local, and the model has a strategy.
    """
    strategy = trainer.distribute_strategy
    if hooks_of(strategy) is not None and current.local:
        raise ValueError(
            "A model that was created inside of the strategy's scope is trained by all "
            f"workers together. Received: model {trainer.name!r} of "
            f"{type(strategy).__name__} inside of `with kerasdist.local_training():`. "
            "Create the model outside of the scope, or leave out `local_training`."
        )
    hooks = _hooks_in_use(trainer)
    if hooks is None:
        return
    known = TRAINED_LOCALLY.get(trainer)
    if current.local or known is None:
        TRAINED_LOCALLY.set(trainer, current.local)
    if current.local or known is not None:
        return
    if hooks.workers.rank == 0:
        warnings.warn(
            f"Model {trainer.name!r} was created, cloned or loaded outside of "
            "`with strategy.scope():`. So each worker trains a model of its own, on "
            "all the data that it is given, and only the chief's is saved. Received: "
            "training of a model without a strategy, beside a strategy of "
            f"{hooks.workers.communicator.size} workers. To train one model on all "
            "workers, create, clone or load it inside `with strategy.scope():`. "
            "If this is meant, put `with kerasdist.local_training():` around the "
            "training.",
            stacklevel=2,
        )


def check_not_local(trainer: Any) -> None:
    """Check that a strategy may adopt a model.

    Raises:
        ValueError: Each worker has trained it for itself.
    """
    if TRAINED_LOCALLY.get(trainer) is not None:
        raise ValueError(
            "Each worker has trained this model for itself: the workers' weights "
            f"differ. Received: model {trainer.name!r}, used inside of the scope of "
            f"{type(trainer.distribute_strategy).__name__}. Use it outside of the "
            "scope, or clone it inside and set the weights of one worker."
        )


def writer_hooks(saved: Any) -> KerasHooks | None:
    """Return the hooks of the strategy whose chief writes files; None: all write.

    Without a strategy all ranks would write the same file. They may if their trainings
    are declared as local.

    Args:
        saved: A model, a layer or an archive: it has a strategy of its own, or that of
            its variables, or none.
    """
    hooks = hooks_of(getattr(saved, "distribute_strategy", None))
    if hooks is not None or TRAINED_LOCALLY.get(saved):
        return hooks
    with contextlib.suppress(AttributeError, IndexError, TypeError, ValueError):
        variable = of_tensorflow(saved.variables[0])
        hooks = hooks_of(getattr(variable, "distribute_strategy", None))
    return hooks or current_hooks() or _hooks_in_use(saved)


def _hooks_in_use(trainer: Any) -> KerasHooks | None:
    """Return the hooks of a strategy of several workers in use; else None."""
    own = getattr(trainer, "_distribute_strategy", None)
    if own is not None or tf.distribute.has_strategy():
        return None
    found: Any = (hooks for hooks in _in_use if hooks.workers.communicator.size > 1)
    return next(found, None)
