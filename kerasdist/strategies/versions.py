"""The check whether strategies can work with the installed Keras and TensorFlow."""

from __future__ import annotations

import functools
import logging

import keras
import tensorflow as tf

from kerasdist import _keras
from kerasdist._tested import TESTED_VERSIONS, range_in_words, was_tested
from kerasdist._tf import patches

_LOG = logging.getLogger("kerasdist")


def check_installed() -> None:
    """Check what is installed, before anything is acquired or changed.

    Versions that fit, but weren't tested, are logged once per process.

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
    warn_of_untested("tensorflow", tf.__version__)
    warn_of_untested("keras", keras.__version__)


@functools.cache
def warn_of_untested(package: str, version: str) -> None:
    """Log a warning, once, if this version of a package wasn't tested.

    Args:
        package: "keras" or "tensorflow".
        version: The installed version.
    """
    if was_tested(package, version):
        return
    newest = TESTED_VERSIONS[package][1]
    _LOG.warning(
        "kerasdist: an installed package has a version with which kerasdist wasn't "
        "tested. Received: %s %s. Tested were %s. All functions that kerasdist wraps "
        "are as expected, so training may work; compare a short one with that of a "
        "single process, or `pip install '%s~=%s.0'`.",
        *(package, version, range_in_words(package), package, newest),
    )
