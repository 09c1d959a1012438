"""Whether the installed Keras and TensorFlow are such that strategies can work."""

from __future__ import annotations

import keras

from kerasdist import _keras
from kerasdist._tf import patches

__all__ = ["check_installed"]


def check_installed() -> None:
    """Look at what is installed, before anything is acquired or changed.

    Raises:
        IncompatibleKerasError: Functions of Keras aren't there or have changed.
        IncompatibleTensorFlowError: The same of TensorFlow.
        ValueError: Keras computes with something else than TensorFlow.
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
