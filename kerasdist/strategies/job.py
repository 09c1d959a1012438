"""The connected workers of a strategy."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

from kerasdist._keras.data.cache_files import note_rank
from kerasdist._keras.data.epoch_iterators import destroy_iterators
from kerasdist.collectives import Communicator
from kerasdist.transport.liveness.announcements import ChiefActions
from kerasdist.transport.liveness.failure_protocol import (
    final_exception,
    hand_over_final_error,
)
from kerasdist.transport.liveness.launcher_pipe import take_stderr


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
    def announcements(self) -> ChiefActions | None:
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
