"""The options of a data-parallel strategy."""

from __future__ import annotations

import dataclasses
import functools
import logging

import keras
import tensorflow as tf

from kerasdist import _keras
from kerasdist._tested import TESTED_VERSIONS, range_in_words, was_tested
from kerasdist._tf import patches

# The check whether strategies can work with the installed Keras and TensorFlow.

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a strategy, except those of the connections.

    Attributes:
        initial_state: The action of `fit` when the workers hold different weights
            before its first step: "check" or "broadcast".
        shard: The kind of data that Keras is given: "rows": the same on all workers,
            divided by rows; or "off": each worker's own.
        data: The action if they aren't the same: "auto", "same" or "chief".
        bucket_size: Bytes of gradients that are sent at once.
        compression: None, "bf16" or "fp16": the dtype in which gradients are sent.

    Raises:
        ValueError: One of them is wrong.
    """

    initial_state: str
    shard: str
    data: str
    bucket_size: int
    compression: str | None

    @property
    def shards(self) -> bool:
        """Whether the data are the same on all workers, each to take its part."""
        return self.shard == "rows"

    def __post_init__(self) -> None:
        if self.shard not in ("rows", "off"):
            raise ValueError(
                f"`shard` must be 'rows' or 'off'. Received: shard={self.shard!r}."
            )
        if self.data not in ("auto", "same", "chief"):
            raise ValueError(
                "`data` must be 'auto', 'same' or 'chief'. "
                f"Received: data={self.data!r}."
            )
        if isinstance(self.bucket_size, bool) or not (
            isinstance(self.bucket_size, int) and self.bucket_size > 0
        ):
            raise ValueError(
                "`bucket_size` must be a positive number of bytes. "
                f"Received: bucket_size={self.bucket_size!r}."
            )
        if self.compression not in (None, "bf16", "fp16"):
            raise ValueError(
                "`compression` must be None, 'bf16' or 'fp16'. "
                f"Received: compression={self.compression!r}."
            )
        if self.initial_state not in ("check", "broadcast"):
            raise ValueError(
                "`initial_state` must be 'check' or 'broadcast'. "
                f"Received: initial_state={self.initial_state!r}."
            )
