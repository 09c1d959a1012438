"""The options of a data-parallel strategy."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import keras
import tensorflow as tf

from kerasdist import _keras
from kerasdist._keras.data.epoch_iterators import destroy_iterators, note_rank
from kerasdist._tf import patches
from kerasdist._version import TESTED_VERSIONS, range_in_words, was_tested
from kerasdist.cluster.tf_config import grace_seconds
from kerasdist.collectives import Communicator
from kerasdist.compression import Compressor
from kerasdist.errors import ClusterError
from kerasdist.transport.liveness.announcements import Announcements
from kerasdist.transport.liveness.failure_protocol import (
    final_exception,
    hand_over_final_error,
)
from kerasdist.transport.liveness.launcher_pipe import take_stderr

if TYPE_CHECKING:
    from kerasdist.collectives.elastic.job import ElasticChiefActions

# The connected workers of a strategy.


class Closable(Protocol):
    """A job, or a part in one, that can be left."""

    def close(self, error: BaseException | None = None) -> None:
        """Leave the job; report to the others what ended this worker's script."""


class StrategyJob(Closable, Protocol):
    """The interface of the connected workers for a strategy, whatever connects them."""

    @property
    def communicator(self) -> Communicator:
        """The communicator of all workers."""

    @property
    def replicas(self) -> tuple[int, ...]:
        """Each worker's number of replicas, by rank."""

    @property
    def has_servers(self) -> bool:
        """Whether parameter servers connect the workers."""

    @property
    def announcements(self) -> Announcements | ElasticChiefActions | None:
        """The chief's announcements outside of collectives; None if unsupported."""


_open: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_at_exit(job: Closable) -> None:
    """Inform the others at the end of this process whether it ended well."""
    _open.add(job)
    communicator = getattr(job, "communicator", None)
    if communicator is not None:
        note_rank(communicator.rank)
    hand_over_final_error()
    # TensorFlow has written all that it writes at its start.
    take_stderr()


def forget(job: Closable) -> None:
    """Unregister a job that has been left. Can be called twice."""
    _open.discard(job)


# A forked child that ends isn't its parent, and must not say goodbye for it.
os.register_at_fork(after_in_child=_open.clear)


def close_open_jobs() -> None:
    """Close all jobs that this process has not closed yet."""
    error = final_exception()
    for job in list(_open):
        job.close(error)


# The last one that is registered is called first: the others are informed before this
# process waits for a function that reads data, which may take its time.
atexit.register(destroy_iterators)
atexit.register(close_open_jobs)


# The options by which a job continues without workers that are lost.

ELASTIC_VARIABLE = "KERASDIST_ELASTIC"
LEAST_VARIABLE = "KERASDIST_MIN_WORKERS"
START_VARIABLE = "KERASDIST_START_WORKERS"


@dataclasses.dataclass(frozen=True)
class Elasticity:
    """The bounds within which the workers of a job may change, and the time for it.

    Attributes:
        min_workers: The smallest number of workers that continue.
        grace: Seconds from SIGTERM until the platform kills a process.
        start_workers: The number of workers with which the job starts; None: all.
    """

    min_workers: int = 1
    grace: float = 30.0
    start_workers: int | None = None


def elasticity(
    elastic: bool | None,
    min_workers: int | None,
    size: int,
    environ: Mapping[str, str] | None = None,
    *,
    start_workers: int | None = None,
) -> Elasticity | None:
    """Return the bounds of an elastic job; None if the job isn't elastic.

    Args:
        elastic: Whether it is; None: by `KERASDIST_ELASTIC`, "1" or "0".
        min_workers: See `Elasticity`; None: `KERASDIST_MIN_WORKERS`, else 1.
        size: The number of workers of the cluster.
        environ: The environment; the process's by default.
        start_workers: See `Elasticity`; None: `KERASDIST_START_WORKERS`, else all.

    Raises:
        ClusterError: A variable has another value.
        ValueError, TypeError: An argument is wrong.
    """
    environ = os.environ if environ is None else environ
    if elastic is None:
        given = environ.get(ELASTIC_VARIABLE, "") or "0"
        if given not in ("0", "1"):
            raise ClusterError(
                f"The variable {ELASTIC_VARIABLE} must be '0' or '1'. "
                f"Received: {given!r}."
            )
        elastic = given == "1"
    if not isinstance(elastic, bool):
        raise TypeError(
            "`elastic` must be a bool, or None for the environment's setting. "
            f"Received: elastic={elastic!r}."
        )
    if not elastic:
        if min_workers is not None:
            raise ValueError(
                "Only an elastic job continues with fewer workers. Received: "
                f"min_workers={min_workers!r} without elastic=True."
            )
        if start_workers is not None:
            raise ValueError(
                "Only an elastic job starts with fewer workers. Received: "
                f"start_workers={start_workers!r} without elastic=True."
            )
        return None
    least = _number("min_workers", min_workers, LEAST_VARIABLE, environ)
    start = _number("start_workers", start_workers, START_VARIABLE, environ)
    least = 1 if least is None else least
    if not 1 <= least <= size:
        raise ValueError(
            "`min_workers` must be at least 1, and at most the number of workers. "
            f"Received: min_workers={least}, with {size} workers."
        )
    if start is not None and not least <= start <= size:
        raise ValueError(
            "`start_workers` must be at least `min_workers`, and at most the number of "
            f"workers. Received: start_workers={start}, with min_workers={least} and "
            f"{size} workers."
        )
    return Elasticity(least, grace_seconds(environ), start)


def _number(
    name: str, given: int | None, variable: str, environ: Mapping[str, str]
) -> int | None:
    """Return a number of workers, by an argument, or else by a variable."""
    if given is None:
        text = environ.get(variable, "")
        if text and not text.isdecimal():
            raise ClusterError(
                f"The variable {variable} must be a number of workers. "
                f"Received: {text!r}."
            )
        return int(text) if text else None
    if isinstance(given, bool) or not isinstance(given, int):
        raise TypeError(
            f"`{name}` must be a number of workers. Received: {name}={given!r}."
        )
    return given


def check_choice(
    name: str, given: object, choices: Sequence[object], more: str = ""
) -> None:
    """Check that an argument is one of some values, which the message lists.

    Args:
        name: The argument's name.
        given: Its value.
        choices: The values.
        more: The end of the message.

    Raises:
        ValueError: It's another one.
    """
    if given not in choices:
        words = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
        raise ValueError(f"`{name}` must be {words}. Received: {name}={given!r}.{more}")


def check_positive(must: str, name: str, given: object, more: str = "") -> None:
    """Check that an argument is a positive integer.

    Args:
        must: What it must be, in words, which begin the message.
        name: The argument's name.
        given: Its value.
        more: The end of the message.

    Raises:
        ValueError: It isn't one.
    """
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"{must}. Received: {name}={given!r}.{more}")


ELASTIC_REFUSAL = (
    "An elastic job continues without workers that are lost, which isn't possible with "
    "every option."
)
CHIEF_REFUSAL = "data='chief', because the chief that has the data may be lost"


def refuse_together(why: str, given: str, *others: tuple[object, str]) -> None:
    """Refuse an option together with others.

    Args:
        why: A sentence about the option.
        given: The option, as it was given.
        *others: Of each other option whether it was given, and how and why not.

    Raises:
        ValueError: One of them was given.
    """
    for is_given, reason in others:
        if is_given:
            raise ValueError(
                f"{why} Received: {given} with {reason}. Leave one of them out."
            )


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
        compression: What sums gradients in place of an all-reduce, if anything does;
            given as a name, too.
        tune: Whether steps are tuned, see `strategies.tuning`.
        compressors: The names of those that tuning may choose in place of none.

    Raises:
        ValueError: One of them is wrong.
    """

    initial_state: str
    shard: str
    data: str
    bucket_size: int
    compression: Compressor | None
    tune: bool = False
    compressors: tuple[str, ...] = ()

    @property
    def shards(self) -> bool:
        """Whether the data are the same on all workers, each to take its part."""
        return self.shard == "rows"

    def __post_init__(self) -> None:
        check_choice("shard", self.shard, ("rows", "off"))
        check_choice("data", self.data, ("auto", "same", "chief"))
        must = "`bucket_size` must be a positive number of bytes"
        check_positive(must, "bucket_size", self.bucket_size)
        check_choice("initial_state", self.initial_state, ("check", "broadcast"))
