"""SIGTERM to a worker of an elastic job: a request to leave it, with a deadline.

    SIGTERM ── wake-up pipe ── this thread: `requested` ── the job, between two steps:
                                  │                        leaves, `end_process`
                                  └ after the deadline: `end_process`

The platform that sends the signal kills the process some time later. The deadline is
before that, so that the process ends by the signal wherever no step follows.

A thread waits for the signal, because Python runs handlers in the main thread alone,
which may be in a function of TensorFlow for long.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import numpy as np

from kerasdist import errors
from kerasdist.collectives.elastic.communicator import ElasticCommunicator
from kerasdist.transport.deadline import daemon
from kerasdist.transport.log import flush, log_in_background

# The members that leave a job as they announce, so that nothing is repeated.
#
#     all        ask whether members want to leave, and which: a collective each
#     a leaver   announces it to the machine, see `collectives.elastic.consensus`
#     all        finish collectives until the change is made; then a leaver stops
#
# If all members leave, there's no change: they stop together.
#
# These collectives are between two steps, so the others continue with the next step.

# Seconds for what precedes the change: the platform ends the process before.
_SAVE_SECONDS = 600.0
# Seconds until a leaver ends in any case. The change takes a fraction of a second.
_SECONDS = 10.0
# Seconds for the change, and the end of the process.
_LEAVE_SECONDS = 2 * _SECONDS


class Leaving:
    """A worker's part in the leaving of members, itself among them.

    Args:
        communicator: Between the present members.
        termination: The request to end this process; None: there will be none.
        min_workers: The smallest number of members that continue.
        end: Ends the membership, when no member is left.

    Attributes:
        termination: See above.
        ids: The members that left last, or are leaving.
    """

    def __init__(
        self,
        communicator: ElasticCommunicator,
        termination: Termination | None,
        min_workers: int,
        end: Callable[[], None],
    ) -> None:
        self.termination = termination
        self.ids: frozenset[int] = frozenset()
        self._communicator = communicator
        self._min_workers = min_workers
        self._end = end

    @property
    def wanted(self) -> bool:
        """Whether this worker wants to leave."""
        return self.termination is not None and self.termination.requested

    @property
    def ends_job(self) -> bool:
        """Whether the members that stay, if any, are too few to continue."""
        stay = set(self._communicator.ranks) - self.ids
        return len(stay) < self._min_workers

    @property
    def includes_this_worker(self) -> bool:
        """Whether this worker is one of the leaving ones."""
        return self._communicator.ranks[self._communicator.rank] in self.ids

    def agree(self) -> None:
        """Find out which members leave; all call it alike."""
        own = self._communicator.ranks[self._communicator.rank]
        mine = np.array([own, self.wanted], np.int64)
        found = self._communicator.all_gather(mine)
        self.ids = frozenset(int(number) for number, leaves in found if leaves)
        if self.termination is not None and self.includes_this_worker:
            self.termination.extend(_SAVE_SECONDS)

    def change(self) -> bool:
        """Let the members leave that have agreed to; all call it alike.

        Returns:
            Whether this worker has left.

        Raises:
            CollectiveError: The others can't continue.
        """
        leaves = self.includes_this_worker
        if self.termination is not None and leaves:
            self.termination.extend(_LEAVE_SECONDS)
        everyone = self.ids >= set(self._communicator.ranks)
        try:
            if everyone:
                self._communicator.barrier()
            else:
                self._await_change(leaves)
        except errors.CollectiveError:
            if not leaves:
                raise
        if everyone:
            # No member is left to agree with. The end of the others, which is next,
            # must not break the group: parameter servers wait for a goodbye through it.
            self._end()
            return True
        # A later process with the task of one of them may be lost.
        self.ids = frozenset()
        return leaves

    @staticmethod
    def end_process() -> NoReturn:
        """Write what the script has printed, then end this process."""
        flush(_LAST_SECONDS)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        end_process()

    def _await_change(self, leaves: bool) -> None:
        communicator = self._communicator
        membership = communicator.membership
        epoch, deadline = communicator.epoch, time.monotonic() + _SECONDS

        def pending() -> bool | None:
            in_time = time.monotonic() < deadline
            if leaves and not in_time:
                return None
            planned = membership.leave() if leaves else membership.admit(False)
            return planned or (in_time and communicator.epoch == epoch)

        communicator.await_changes(pending)


# Of the platform's seconds: in `fit`, where the process may leave after its step, and
# elsewhere, where a `fit` may begin.
_PART_IN_FIT = 5 / 6
_PART = 1 / 3
# For the last lines of the log, and for the signal to have an effect.
_LAST_SECONDS = 1.0
_END = b"\0"
_REQUEST = bytes([signal.SIGTERM])


class Termination:
    """The request to end this process; shared by the elastic jobs of the process.

    It's the handler of the signal. Made by `acquire`.

    Args:
        seconds: See `acquire`.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._users = 0
        self._fits = 0
        self._until: float | None = None
        self._at: float | None = None
        self._changed = threading.Condition()
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        if before != -1:
            # It belongs to the script; then the handler alone writes to the pipe.
            signal.set_wakeup_fd(before)
        signal.signal(signal.SIGTERM, self)
        self._thread = daemon("kerasdist-sigterm", self._run)
        self._thread.start()

    @classmethod
    def acquire(cls, seconds: float) -> Termination | None:
        """Return that of this process, for one more job; `release` it later.

        Args:
            seconds: The time from the signal until the platform kills the process.

        Returns:
            None if the script has a handler of its own, or ignores the signal, or if
            this isn't the main thread, in which alone a handler can be installed.
        """
        present = signal.getsignal(signal.SIGTERM)
        if not isinstance(present, cls):
            main = threading.current_thread() is threading.main_thread()
            if present is not signal.SIG_DFL or not main:
                return None
            present = cls(seconds)
        present._users += 1
        return present

    def release(self) -> None:
        """Restore the default action for the last job, unless the signal has arrived.

        After the signal the process ends at the deadline, without jobs, too.
        """
        self._users -= 1
        main = threading.current_thread() is threading.main_thread()
        if self._users or self.requested or not main:
            return
        if signal.getsignal(signal.SIGTERM) is self:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._restore_wakeup()
        self._write(_END)
        self._thread.join(_LAST_SECONDS)
        self._close_pipe()

    @property
    def requested(self) -> bool:
        """Whether the signal has arrived."""
        return self._at is not None

    @contextlib.contextmanager
    def in_fit(self) -> Iterator[None]:
        """Grant the time of a `fit` for the length of a block."""
        with self._changed:
            self._fits += 1
        try:
            yield
        finally:
            with self._changed:
                self._fits -= 1
                self._changed.notify_all()

    def extend(self, seconds: float) -> None:
        """Set another deadline: the job has agreed that this worker leaves.

        Args:
            seconds: The seconds from now to the end of the process.
        """
        with self._changed:
            self._until = time.monotonic() + seconds
            self._changed.notify_all()

    def abandon(self) -> None:
        """Restore the default action in a forked child, which is no worker."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._restore_wakeup()
        self._close_pipe()

    def __call__(self, number: int, frame: object) -> None:
        """Handle the signal, of which the thread may have read already."""
        self._write(_REQUEST)

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # full: the signal has arrived before
            os.write(self._writing, data)

    def _restore_wakeup(self) -> None:
        present = signal.set_wakeup_fd(-1)
        if present not in (-1, self._writing):
            signal.set_wakeup_fd(present)

    def _close_pipe(self) -> None:
        for descriptor in (self._reading, self._writing):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._reading = self._writing = -1

    def _run(self) -> None:
        while not self.requested:
            # Other signals for which there are handlers write to it, too.
            data = os.read(self._reading, 512)
            if _END in data:
                return
            if _REQUEST in data:
                self._at = time.monotonic()
        with self._changed:
            while (rest := self._remaining()) > 0:
                self._changed.wait(rest)
        reason = "it couldn't leave the job in time"
        if self._until is None:
            reason = (
                "it took no further step of `fit`, after which it could have left the "
                "job, and wrote no checkpoint"
            )
        log_in_background(
            logging.WARNING,
            "kerasdist: this worker received SIGTERM %.0f s ago, and ends now: %s",
            time.monotonic() - (self._at or 0.0),
            reason,
        )
        flush(_LAST_SECONDS)
        end_process()

    def _remaining(self) -> float:
        until = self._until
        if until is None:
            part = _PART_IN_FIT if self._fits else _PART
            until = (self._at or 0.0) + part * self._seconds
        return until - time.monotonic()


# A signal to a child must not reach it before `abandon`: it would seem to be this
# process's, because the pipe is the same.
_forking = threading.local()


def _before_fork() -> None:
    _forking.mask = None
    if isinstance(signal.getsignal(signal.SIGTERM), Termination):
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    present = signal.getsignal(signal.SIGTERM)
    if isinstance(present, Termination):
        present.abandon()
    _after_fork()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child
)


def end_process() -> NoReturn:
    """End this process as SIGTERM does by default; can be called by any thread."""
    with contextlib.suppress(OSError, AttributeError):
        # `signal.signal` works in the main thread alone, which may be busy.
        default = ctypes.CDLL(None).signal
        default.restype = ctypes.c_void_p
        default.argtypes = (ctypes.c_int, ctypes.c_void_p)
        default(signal.SIGTERM, None)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_LAST_SECONDS)
    # The first process of a container isn't ended by a signal of its own.
    os._exit(128 + signal.SIGTERM)
