"""The Keras seam: the only package that imports `keras.src`.

    protocols   the interface of a strategy's hooks
    context     the facts about the step that a thread traces
    patches     the table of the functions of Keras that are wrapped
    all others  those hooks, each module for one concern, and the inspection of models

`install` puts the hooks of the table into Keras. Each does what Keras does, unless the
strategy in use has `KerasHooks`, or a `LayerPlacer`. Other packages use the names of
`__all__`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras

from kerasdist._keras import patches
from kerasdist._tested import range_in_words
from kerasdist._tf.patching import Patcher
from kerasdist.errors import IncompatibleKerasError


def _refuse(faults: list[str]) -> IncompatibleKerasError:
    return IncompatibleKerasError(keras.__version__, faults, range_in_words("keras"))


_PATCHER = Patcher("kerasdist._keras", patches.TABLE, _refuse)


@contextlib.contextmanager
def _explaining() -> Iterator[None]:
    """Report all that doesn't fit if a module of Keras is missing."""
    try:
        yield
    except ImportError as error:
        if not (error.name or "").startswith("keras."):
            raise
        _PATCHER.check()
        raise _refuse([f"an import from it fails: {error}"]) from error


with _explaining():
    from kerasdist._keras.context import gradients_are_reduced, is_timed
    from kerasdist._keras.data.arrays import (
        ArrayData,
        BatchIterable,
        BatchIterator,
        CountedData,
        LoopData,
        RepeatableIterator,
        random_seed,
    )
    from kerasdist._keras.data.pydataset import GeneratorFacts, ItemData, close_at_end
    from kerasdist._keras.distribution import distribution_owner, set_distribution_owner
    from kerasdist._keras.learning_rate import own_steps
    from kerasdist._keras.placement.layers import (
        LayerFacts,
        LayerPlacer,
        called_layer,
        device_of_variable,
        placer_of,
    )
    from kerasdist._keras.placement.micro_batches import dividing
    from kerasdist._keras.placement.rematerialize import rematerializing
    from kerasdist._keras.protocols import (
        GradientHooks,
        KerasHooks,
        StateHooks,
        StepTimer,
    )
    from kerasdist._keras.tracebacks import OnceLogger
    from kerasdist._keras.training.state import copied_to, whole_state
    from kerasdist._keras.training.train_step import new_train_function
    from kerasdist._keras.unscoped_models import begin_use, end_use, local_training

__all__ = [
    "ArrayData",
    "BatchIterable",
    "BatchIterator",
    "CountedData",
    "GeneratorFacts",
    "GradientHooks",
    "ItemData",
    "KerasHooks",
    "LayerFacts",
    "LayerPlacer",
    "LoopData",
    "OnceLogger",
    "RepeatableIterator",
    "StateHooks",
    "StepTimer",
    "begin_use",
    "called_layer",
    "check",
    "close_at_end",
    "copied_to",
    "device_of_variable",
    "distribution_owner",
    "dividing",
    "end_use",
    "gradients_are_reduced",
    "install",
    "is_timed",
    "local_training",
    "new_train_function",
    "own_steps",
    "placer_of",
    "random_seed",
    "rematerializing",
    "set_distribution_owner",
    "uninstall",
    "whole_state",
]


def check() -> None:
    """Check that Keras has every function that is wrapped. Changes nothing.

    Raises:
        IncompatibleKerasError: Lists all that is missing or different.
    """
    _PATCHER.check()


def install(*features: str) -> None:
    """Put hooks into Keras, each once per process.

    Args:
        *features: The features that are needed besides "core", see `patches`.

    Raises:
        IncompatibleKerasError: See `check`. Nothing has changed.
    """
    _PATCHER.install("core", *features)


def uninstall() -> None:
    """Take the hooks out of Keras, for tests."""
    _PATCHER.uninstall()
