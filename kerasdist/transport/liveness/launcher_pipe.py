"""Reports from workers and servers to the launcher that started them, on a pipe.

All ranks of a job agree on its first failure, but their processes may end in another
order: a rank that has lost rank 1 may end before rank 1 does. So each reports the rank
that caused the failure as soon as it knows, on a pipe that all workers share with the
launcher: one line of JSON, in one write of less than PIPE_BUF bytes, which therefore is
never mixed with another's. There is no reply, and no fault of the pipe may disturb the
job.

A job with asynchronous parameter servers continues without a lost worker. The launcher
mustn't end it then: the servers report on the same pipe that it is such a job, before
any worker learns that it has begun, and which workers are lost. A server that ends
because of another task, in any job, reports that before it ends.

An elastic job continues without lost workers, too. There the members of each epoch
report its list of members: the launcher shows the output of the first, the chief.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from kerasdist import errors
from kerasdist.transport.framing import from_plain, to_object

# The launcher's standard error, which the chief takes when its start is over.
#
# Until then the launcher copies the chief's lines, and takes out those that TensorFlow
# writes when it is imported.

STDERR_VARIABLE = "KERASDIST_STDERR_FD"


def stderr_environ(real: int, copied: int) -> dict[str, str]:
    """Return the variable that names both to the chief.

    Args:
        real: A copy of the launcher's standard error, which the chief inherits.
        copied: What the chief has as its standard error at the start.
    """
    return {STDERR_VARIABLE: f"{descriptor_in_words(real)}/{os.fstat(copied).st_ino}"}


def take_stderr() -> None:
    """Let standard error be the launcher's, if this process's one is copied by it.

    A script that has made its standard error another file keeps that.
    """
    named, _, inode = os.environ.get(STDERR_VARIABLE, "").partition("/")
    real = descriptor_named(named, lambda mode: True)
    if real is None:
        return
    try:
        if str(os.fstat(2).st_ino) == inode:
            if sys.__stderr__ is not None:
                sys.__stderr__.flush()
            os.dup2(real, 2)
        os.close(real)
    except (OSError, ValueError):
        # It was closed, by the script or by another thread.
        return


REPORT_VARIABLE = "KERASDIST_REPORT_FD"
# The smallest PIPE_BUF of any system.
_MOST_BYTES = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The report of one rank.

    Attributes:
        job: Name of the job, the same on all of its ranks; a script may have several.
        rank: The rank that reports.
        error: Class of the job's first failure, e.g. `"WorkerLost"`.
        blames: The rank that was lost. None: no single rank is the cause, as when
            ranks called different collectives.
        server: Index of the parameter server that was lost, or None.
    """

    job: str
    rank: int
    error: str
    blames: int | None
    server: int | None = None

    @property
    def names_another(self) -> bool:
        """Whether another task is the cause, not the rank that reports."""
        return self.server is not None or self.blames not in (None, self.rank)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Notice:
    """The notice of one server about a job that continues without lost workers.

    Attributes:
        server: Index of the server.
        kind: "begun": the job begins, and continues without lost workers from now on.
            "failed": it has failed after all. "gave_up": this server ends because of
            another task that was lost. Or an event of a worker: "lost", "joined",
            "returned" or "finished".
        rank: That worker, or None.
        reason: The observed cause, without a full stop.
        patience: Of "begun": the seconds that a lost server is waited for; 0: without
            it the job has failed.
    """

    server: int
    kind: str
    rank: int | None = None
    reason: str = ""
    patience: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Members:
    """The members of one epoch of an elastic job; all of them report the same.

    Attributes:
        job: Name of the job, the same in all of its epochs.
        epoch: Number of the epoch, larger than that of the one before.
        ranks: The ranks with which the members were started, in their present order:
            the first is the chief. A list that is too long for a line is cut.
        size: Number of members.
        step: The first step that the members do in this epoch.
        pause: Seconds for which training was interrupted before that step.
    """

    job: str
    epoch: int
    ranks: tuple[int, ...]
    size: int
    step: int
    pause: float

    @property
    def complete(self) -> bool:
        """Whether `ranks` has all members."""
        return len(self.ranks) == self.size


Record = Report | Notice | Members
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Record)}
# What is cut if a line is too long.
_LONG = {Notice: "reason", Members: "ranks"}


def encode(record: Record) -> bytes:
    """Return the line of a record, with its end.

    A long reason is cut, and a long list of members, but for the chief.
    """
    kind = type(record)
    line = json.dumps({kind.__name__: to_object(record)}).encode() + b"\n"
    name = _LONG.get(kind, "")
    long = getattr(record, name, "")
    if len(line) <= _MOST_BYTES or len(long) < 2:
        return line
    cut: dict[str, Any] = {name: long[: len(long) * 3 // 4]}
    return encode(dataclasses.replace(record, **cut))


def decode(line: bytes) -> Record | None:
    """Return the record in a line; None if it holds none."""
    try:
        ((name, value),) = json.loads(line).items()
        found: Record = from_plain(value, _KINDS[name])
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return None
    return None if isinstance(found, Members) and not found.ranks else found


class LauncherPipe:
    """The pipe, as the launcher has it.

    Attributes:
        reading: The end to read from, which doesn't block. It never reaches the end of
            file, because the other end stays open here.
        writing: The end for the tasks.
    """

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)
        self._pending = b""

    @property
    def environ(self) -> dict[str, str]:
        """The variable that names `writing` to a task that inherits it."""
        return {REPORT_VARIABLE: descriptor_in_words(self.writing)}

    def read(self) -> list[Record]:
        """Return what has arrived, in order, without waiting."""
        found: list[Record] = []
        while True:
            try:
                data = os.read(self.reading, 65536)
            except BlockingIOError:
                return found
            *lines, self._pending = (self._pending + data).split(b"\n")
            found += [each for line in lines if (each := decode(line)) is not None]


class InheritedDescriptor:
    """A descriptor that this process has inherited from a launcher, if there is one.

    Args:
        variable: The variable that names it.
        is_kind: See `descriptor_named`.
        environ: The environment; the process's by default.
    """

    def __init__(
        self,
        variable: str,
        is_kind: Callable[[int], bool],
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._named = (os.environ if environ is None else environ).get(variable, "")
        self._is_kind = is_kind
        descriptor = self.get()
        if descriptor is not None:
            # This process had to inherit it; processes of the script mustn't.
            with contextlib.suppress(OSError):
                os.set_inheritable(descriptor, False)

    def get(self) -> int | None:
        """Return it; None if the script has closed it, or opened another file."""
        return descriptor_named(self._named, self._is_kind)


class _WritingEnd(InheritedDescriptor):
    """The writing end of the launcher's pipe, if there is a launcher."""

    def __init__(self, environ: Mapping[str, str] | None) -> None:
        super().__init__(REPORT_VARIABLE, stat.S_ISFIFO, environ)

    def write(self, record: Record) -> None:
        """Write a line. Never waits, and never raises `OSError`."""
        descriptor = self.get()
        if descriptor is None:
            return
        # Full, or not read any more: then the launcher has to guess.
        with contextlib.suppress(OSError):
            os.set_blocking(descriptor, False)
            os.write(descriptor, encode(record))


class Reporter:
    """Reports on one job of this worker, if there is a launcher.

    No method waits, or raises `OSError`.

    Args:
        job: Name of the job, the same on all of its ranks and in all of its epochs.
        rank: The rank with which this worker was started.
        environ: The environment with `KERASDIST_REPORT_FD`; the process's by default.
    """

    def __init__(
        self, job: str, rank: int, environ: Mapping[str, str] | None = None
    ) -> None:
        self._job = job
        self._rank = rank
        self._pipe = _WritingEnd(environ)

    def failed(self, error: errors.CollectiveError) -> None:
        """Report that the job has failed, and doesn't continue without lost workers.

        Args:
            error: The job's first failure, on which all ranks agree.
        """
        report = Report(
            job=self._job,
            rank=self._rank,
            error=type(error).__name__,
            blames=error.rank if isinstance(error, errors.WorkerLost) else None,
            server=error.index if isinstance(error, errors.ServerLost) else None,
        )
        self._pipe.write(report)

    def members(
        self, epoch: int, ranks: Sequence[int], step: int, pause: float = 0.0
    ) -> None:
        """Report the members of an epoch of an elastic job, when it begins.

        Each member reports the same; the launcher acts on the first of these reports.
        Then it shows what the new chief prints, also since the former one has ended.

        Args:
            epoch: Number of the epoch, larger than that of the one before.
            ranks: The ranks with which the members were started, the chief's first;
                at least one.
            step: The first step that the members do in this epoch.
            pause: Seconds for which training was interrupted before that step.
        """
        members = Members(
            job=self._job,
            epoch=epoch,
            ranks=tuple(ranks),
            size=len(ranks),
            step=step,
            pause=pause,
        )
        self._pipe.write(members)


class ServerReporter:
    """Reports the events of a job and its end, if there is a launcher.

    `report` doesn't wait, or raise `OSError`.

    Args:
        server: Index of this server.
        environ: The environment with `KERASDIST_REPORT_FD`; the process's by default.
    """

    def __init__(self, server: int, environ: Mapping[str, str] | None = None) -> None:
        self._server = server
        self._pipe = _WritingEnd(environ)

    def report(self, kind: str, **facts: Any) -> None:
        """Report an event.

        Args:
            kind: See `Notice`.
            facts: Its further fields.
        """
        self._pipe.write(Notice(server=self._server, kind=kind, **facts))


def descriptor_in_words(descriptor: int) -> str:
    """Return the name of an inherited descriptor, for an environment variable.

    It has the inode: the variable may be inherited by a process that hasn't inherited
    the descriptor, and has another file under its number.
    """
    return f"{descriptor}:{os.fstat(descriptor).st_ino}"


def descriptor_named(named: str, is_kind: Callable[[int], bool]) -> int | None:
    """Return the descriptor that `descriptor_in_words` named, if it is still the same.

    Args:
        named: The name.
        is_kind: Whether a file mode is of the expected kind, as `stat.S_ISFIFO`.
    """
    number, _, inode = named.partition(":")
    try:
        found = os.fstat(int(number))
    except (ValueError, OverflowError, OSError):
        return None
    if not is_kind(found.st_mode) or str(found.st_ino) != inode:
        return None
    return int(number)
