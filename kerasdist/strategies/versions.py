"""The check whether strategies can work with the installed Keras and TensorFlow."""

from __future__ import annotations

import keras

from kerasdist import _keras
from kerasdist._tf import patches

__all__ = ["check_installed"]


def check_installed() -> None:
    """Check what is installed, before anything is acquired or changed.

    Raises:
        IncompatibleKerasError: Functions of Keras are missing or have changed.
        IncompatibleTensorFlowError: Functions of TensorFlow are missing or have
            changed.
        ValueError: Keras's backend isn't TensorFlow.
    """
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ValueError(
            "Strategies of kerasdist are for Keras on TensorFlow. Received: Keras's "
            f"backend is {backend!r}. Set the environment variable KERAS_BACKEND to "
            "'tensorflow' before Keras is imported, or leave it out; a "
            "`keras.json` may name another one, too."
        )
    patches.check()
    _keras.check()
