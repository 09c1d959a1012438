"""The Keras seam: the only package that imports `keras.src`.

    protocols   the interface of a strategy's hooks
    context     the facts about the step that a thread traces
    patches     the table of the functions of Keras that are wrapped
    all others  those hooks, each module for one concern, and the inspection of models

`install` puts the hooks of the table into Keras. Each does what Keras does, unless the
strategy in use has `KerasHooks`, or a `LayerPlacer`. Other packages import the others
from their modules.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

import keras

from kerasdist._keras import patches
from kerasdist._tf.patching import Patcher
from kerasdist._version import range_in_words
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
    for _row in patches.TABLE:
        importlib.import_module(f"{__name__}.{_row.hook.rpartition('.')[0]}")


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
