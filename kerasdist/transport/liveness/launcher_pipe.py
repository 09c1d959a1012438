"""Reports from workers and servers to the launcher that started them, on a pipe.

All ranks of a job agree on its first failure, but their processes may end in another
order: a rank that has lost rank 1 may end before rank 1 does. So each reports the rank
that caused the failure as soon as it knows, on a pipe that all workers share with the
launcher: one line of JSON, in one write of less than PIPE_BUF bytes, which therefore is
never mixed with another's. There is no reply, and no fault of the pipe may disturb the
job.

A job with asynchronous parameter servers continues without a lost worker. The launcher
mustn't end it then: the servers report on the same pipe that it is such a job, before
any worker learns that it has begun, and which workers are lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
from collections.abc import Mapping

from kerasdist import errors

__all__ = [
    "REPORT_VARIABLE",
    "Notice",
    "Report",
    "Reporter",
    "ServerReporter",
    "pipe_in_words",
]

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

    def encode(self) -> bytes:
        """Return the line, with its end."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @staticmethod
    def decode(line: bytes) -> Report | None:
        """Return the report in a line; None if it isn't one."""
        try:
            value = json.loads(line)
            job, rank, error = value["job"], value["rank"], value["error"]
            blames, server = value["blames"], value.get("server")
            return Report(
                job=str(job),
                rank=int(rank),
                error=str(error),
                blames=None if blames is None else int(blames),
                server=None if server is None else int(server),
            )
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
            return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Notice:
    """The notice of one server about a job that continues without lost workers.

    Attributes:
        server: Index of the server.
        kind: "begun", "failed", or an event of a worker: "lost", "joined",
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

    def encode(self) -> bytes:
        """Return the line, with its end; a long reason is cut."""
        reason = self.reason
        while True:
            short = dataclasses.replace(self, reason=reason)
            line = json.dumps({"notice": dataclasses.asdict(short)}).encode() + b"\n"
            if len(line) <= _MOST_BYTES or not reason:
                return line
            reason = reason[: len(reason) * 3 // 4]

    @staticmethod
    def decode(line: bytes) -> Notice | None:
        """Return the notice in a line; None if it isn't one."""
        try:
            value = json.loads(line)["notice"]
            rank = value["rank"]
            return Notice(
                server=int(value["server"]),
                kind=str(value["kind"]),
                rank=None if rank is None else int(rank),
                reason=str(value["reason"]),
                patience=float(value["patience"]),
            )
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
            return None


class _Pipe:
    """The writing end of the launcher's pipe, if there is a launcher.

    Args:
        environ: The environment with `KERASDIST_REPORT_FD`; the process's by default.
    """

    def __init__(self, environ: Mapping[str, str] | None) -> None:
        self._named = (os.environ if environ is None else environ).get(
            REPORT_VARIABLE, ""
        )
        descriptor = _launchers_pipe(self._named)
        if descriptor is not None:
            # This process had to inherit it; processes of the script mustn't.
            with contextlib.suppress(OSError):
                os.set_inheritable(descriptor, False)

    def write(self, line: bytes) -> None:
        """Write a line. Never waits, and never raises `OSError`."""
        # Checked again: the script may have closed it, and opened another file.
        descriptor = _launchers_pipe(self._named)
        if descriptor is None:
            return
        # Full, or not read any more: then the launcher has to guess.
        with contextlib.suppress(OSError):
            os.set_blocking(descriptor, False)
            os.write(descriptor, line)


class Reporter:
    """Reports the failure of one job of this worker, if there is a launcher.

    Args:
        job: Name of the job, the same on all of its ranks.
        rank: This worker's rank.
        environ: The environment with `KERASDIST_REPORT_FD`; the process's by default.
    """

    def __init__(
        self, job: str, rank: int, environ: Mapping[str, str] | None = None
    ) -> None:
        self._job = job
        self._rank = rank
        self._pipe = _Pipe(environ)

    def failed(self, error: errors.CollectiveError) -> None:
        """Report that the job has failed. Never waits, and never raises `OSError`.

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
        self._pipe.write(report.encode())


class ServerReporter:
    """Reports the events of a job that can lose workers, if there is a launcher.

    No method waits, or raises `OSError`.

    Args:
        server: Index of this server.
        environ: The environment with `KERASDIST_REPORT_FD`; the process's by default.
    """

    def __init__(self, server: int, environ: Mapping[str, str] | None = None) -> None:
        self._server = server
        self._pipe = _Pipe(environ)

    def begun(self, patience: float) -> None:
        """Report that the job begins, and continues without lost workers from now on.

        Args:
            patience: The seconds that a lost server is waited for; 0: not at all.
        """
        self._write(Notice(server=self._server, kind="begun", patience=patience))

    def failed(self, error: errors.CollectiveError) -> None:
        """Report that the job has failed after all."""
        text = f"{type(error).__name__}: {error}"
        self._write(Notice(server=self._server, kind="failed", reason=text))

    def happened(self, kind: str, rank: int, reason: str) -> None:
        """Report an event of a worker, see `Notice`."""
        self._write(Notice(server=self._server, kind=kind, rank=rank, reason=reason))

    def _write(self, notice: Notice) -> None:
        self._pipe.write(notice.encode())


def pipe_in_words(descriptor: int) -> str:
    """Return the name of the writing end of a pipe, for `KERASDIST_REPORT_FD`.

    It has the inode: the variable may be inherited by a process that hasn't inherited
    the pipe, and has another file under its number.
    """
    return f"{descriptor}:{os.fstat(descriptor).st_ino}"


def _launchers_pipe(named: str) -> int | None:
    """Return the descriptor that `pipe_in_words` named, if it is still that pipe."""
    number, _, inode = named.partition(":")
    try:
        found = os.fstat(int(number))
    except (ValueError, OverflowError, OSError):
        return None
    if not stat.S_ISFIFO(found.st_mode) or str(found.st_ino) != inode:
        return None
    return int(number)
