"""Models that no strategy trains, beside a strategy of several workers.

A model that was made, cloned or loaded outside of the scope is trained by each worker
for itself. That is seldom meant, and nothing else would show it: the chief warns.
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

__all__ = [
    "begin_use",
    "check_not_local",
    "end_use",
    "is_in_use",
    "local_training",
    "warn_if_outside",
    "writer_hooks",
]

_LOCAL = "_kerasdist_local"
_WARNED = "_kerasdist_warned"
# The hooks of strategies that are neither closed nor forgotten.
_in_use: weakref.WeakSet[Any] = weakref.WeakSet()


def begin_use(hooks: KerasHooks) -> None:
    """A strategy has been created."""
    _in_use.add(hooks)


def end_use(hooks: KerasHooks) -> None:
    """A strategy has been closed; can be called twice."""
    _in_use.discard(hooks)


def is_in_use(hooks: KerasHooks) -> bool:
    """Whether a strategy can be asked for collectives: hasn't been closed."""
    return hooks in _in_use


@contextlib.contextmanager
def local_training() -> Iterator[None]:
    """Say that models are trained by each worker for itself, and that this is meant.

        with kerasdist.local_training():
            model.fit(x, y)

    Such a model was made outside of the strategy's scope. Each worker then trains a
    model of its own on all the data that it is given, and saves it, if it is told to:
    give each rank a file of its own. Without several workers nothing is different.
    """
    with setting(local=True):
        yield


def warn_if_outside(trainer: Any) -> None:
    """Training is about to begin: warn if each worker does it for itself.

    Once per model, on the chief. Models of another `tf.distribute` strategy aren't
    concerned, nor are strategies of one worker.

    Raises:
        ValueError: The training is said to be local, and the model is a strategy's.
    """
    strategy = trainer.distribute_strategy
    if hooks_of(strategy) is not None and current.local:
        raise ValueError(
            "A model that was created inside of the strategy's scope is trained by all "
            f"workers together. Received: model {trainer.name!r} of "
            f"{type(strategy).__name__} inside of `with kerasdist.local_training():`. "
            "Create the model outside of the scope, or leave out `local_training`."
        )
    hooks = _beside(trainer)
    if hooks is None:
        return
    marks = vars(trainer)
    if current.local:
        marks[_LOCAL] = True
    if _LOCAL in marks or _WARNED in marks:
        return
    marks[_WARNED] = True
    if hooks.rank == 0:
        warnings.warn(
            f"Model {trainer.name!r} was created, cloned or loaded outside of "
            "`with strategy.scope():`. So each worker trains a model of its own, on "
            "all the data that it is given, and only the chief's is saved. Received: "
            "training of a model without a strategy, beside a strategy of "
            f"{hooks.workers} workers. To train one model on all workers, create, "
            "clone or load it inside `with strategy.scope():`. If this is meant, say "
            "so: `with kerasdist.local_training():` around the training.",
            stacklevel=2,
        )


def check_not_local(trainer: Any) -> None:
    """Check that a model may become a strategy's.

    Raises:
        ValueError: It was trained by each worker for itself.
    """
    if _LOCAL in vars(trainer) or _WARNED in vars(trainer):
        raise ValueError(
            "Each worker has trained this model for itself: the workers' weights "
            f"differ. Received: model {trainer.name!r}, used inside of the scope of "
            f"{type(trainer.distribute_strategy).__name__}. Use it outside of the "
            "scope, or clone it inside and set the weights of one worker."
        )


def writer_hooks(saved: Any) -> KerasHooks | None:
    """The hooks of the strategy whose chief writes files; None: each rank writes.

    Of what was made outside of the scope all ranks would write the same file. They may
    if their trainings are said to be local.

    Args:
        saved: A model, a layer or an archive: what has a strategy of its own, or the
            one that its variables have, or none.
    """
    hooks = hooks_of(getattr(saved, "distribute_strategy", None))
    if hooks is not None or _LOCAL in vars(saved):
        return hooks
    with contextlib.suppress(AttributeError, IndexError, TypeError, ValueError):
        variable = saved.variables[0]
        variable = getattr(variable, "value", variable)
        hooks = hooks_of(getattr(variable, "distribute_strategy", None))
    return hooks or current_hooks() or _beside(saved)


def _beside(trainer: Any) -> KerasHooks | None:
    """The hooks of a strategy of several workers beside a model without a strategy."""
    own = getattr(trainer, "_distribute_strategy", None)
    if own is not None or tf.distribute.has_strategy():
        return None
    found: Any = (hooks for hooks in _in_use if hooks.workers > 1)
    return next(found, None)
