"""Workers and servers tell the launcher that started them how their job goes.

All ranks of a job agree on its first failure, but their processes needn't end in
that order: whoever has lost rank 1 may be gone before rank 1 is. So each says whom
the failure is blamed on as soon as it knows, on a pipe that all workers share with
the launcher: one line of JSON, in one write of less than PIPE_BUF bytes, which
therefore is never mixed with another's. Nobody answers, and nothing that goes wrong
here may disturb the job.

A job with asynchronous parameter servers goes on without a lost worker. The launcher
mustn't end it then: its servers tell by the same way that it is such a job, before any
worker hears that it has begun, and who is lost.
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
# The least PIPE_BUF that there is.
_MOST_BYTES = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What one rank says.

    Attributes:
        job: Name of the job, alike on all of its ranks; a script may have several.
        rank: Who says it.
        error: Class of the job's first failure, e.g. `"WorkerLost"`.
        blames: The rank that was lost. None: no single rank is to blame, as when
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
        """Return what a line says; None if it isn't a report."""
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
    """What one server says of a job that goes on without lost workers.

    Attributes:
        server: Index of the server.
        kind: "begun", "failed", or what has happened to a worker: "lost", "joined",
            "returned" or "finished".
        rank: That worker, or None.
        reason: What was seen, without a full stop.
        patience: Of "begun": how many seconds a lost server is waited for; 0: without
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
        """Return what a line says; None if it isn't a notice."""
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
        environ: Where `KERASDIST_REPORT_FD` is; the process's by default.
    """

    def __init__(self, environ: Mapping[str, str] | None) -> None:
        self._named = (os.environ if environ is None else environ).get(
            REPORT_VARIABLE, ""
        )
        descriptor = _launchers_pipe(self._named)
        if descriptor is not None:
            # It had to be inherited by this process; the script's are no workers.
            with contextlib.suppress(OSError):
                os.set_inheritable(descriptor, False)

    def write(self, line: bytes) -> None:
        """Write a line. Never waits, and never raises `OSError`."""
        # Looked up again: the script may have closed it, and opened something else.
        descriptor = _launchers_pipe(self._named)
        if descriptor is None:
            return
        # Full, or nobody reads it any more: then the launcher has to guess.
        with contextlib.suppress(OSError):
            os.set_blocking(descriptor, False)
            os.write(descriptor, line)


class Reporter:
    """Reports the failure of one job of this worker, if there is a launcher.

    Args:
        job: Name of the job, alike on all of its ranks.
        rank: This worker's rank.
        environ: Where `KERASDIST_REPORT_FD` is; the process's by default.
    """

    def __init__(
        self, job: str, rank: int, environ: Mapping[str, str] | None = None
    ) -> None:
        self._job = job
        self._rank = rank
        self._pipe = _Pipe(environ)

    def failed(self, error: errors.CollectiveError) -> None:
        """Say that the job has failed. Never waits, and never raises `OSError`.

        Args:
            error: The job's first failure, as all ranks have agreed.
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
    """Tells how a job goes on that can lose workers, if there is a launcher.

    No method waits, or raises `OSError`.

    Args:
        server: Index of this server.
        environ: Where `KERASDIST_REPORT_FD` is; the process's by default.
    """

    def __init__(self, server: int, environ: Mapping[str, str] | None = None) -> None:
        self._server = server
        self._pipe = _Pipe(environ)

    def begun(self, patience: float) -> None:
        """The job begins, and from now on goes on without lost workers.

        Args:
            patience: How many seconds a lost server is waited for; 0: not at all.
        """
        self._write(Notice(server=self._server, kind="begun", patience=patience))

    def failed(self, error: errors.CollectiveError) -> None:
        """The job has failed after all."""
        text = f"{type(error).__name__}: {error}"
        self._write(Notice(server=self._server, kind="failed", reason=text))

    def happened(self, kind: str, rank: int, reason: str) -> None:
        """Something has happened to a worker, see `Notice`."""
        self._write(Notice(server=self._server, kind=kind, rank=rank, reason=reason))

    def _write(self, notice: Notice) -> None:
        self._pipe.write(notice.encode())


def pipe_in_words(descriptor: int) -> str:
    """Name the writing end of a pipe for `KERASDIST_REPORT_FD`.

    With its inode: the variable may come down to a process that hasn't inherited
    the pipe, and has something else under its number.
    """
    return f"{descriptor}:{os.fstat(descriptor).st_ino}"


def _launchers_pipe(named: str) -> int | None:
    """Return the descriptor that `pipe_in_words` has named, if it is that pipe."""
    number, _, inode = named.partition(":")
    try:
        found = os.fstat(int(number))
    except (ValueError, OverflowError, OSError):
        return None
    if not stat.S_ISFIFO(found.st_mode) or str(found.st_ino) != inode:
        return None
    return int(number)
