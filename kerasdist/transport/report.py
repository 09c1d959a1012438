"""A worker tells the launcher that started it how its job has failed.

All ranks of a job agree on its first failure, but their processes needn't end in
that order: whoever has lost rank 1 may be gone before rank 1 is. So each says whom
the failure is blamed on as soon as it knows, on a pipe that all workers share with
the launcher: one line of JSON, in one write of less than PIPE_BUF bytes, which
therefore is never mixed with another's. Nobody answers, and nothing that goes wrong
here may disturb the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
from collections.abc import Mapping

from kerasdist import errors

__all__ = ["REPORT_VARIABLE", "Report", "Reporter", "pipe_in_words"]

REPORT_VARIABLE = "KERASDIST_REPORT_FD"


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
        self._named = (os.environ if environ is None else environ).get(
            REPORT_VARIABLE, ""
        )
        descriptor = _launchers_pipe(self._named)
        if descriptor is not None:
            # It had to be inherited by this process; the script's are no workers.
            with contextlib.suppress(OSError):
                os.set_inheritable(descriptor, False)

    def failed(self, error: errors.CollectiveError) -> None:
        """Say that the job has failed. Never waits, and never raises `OSError`.

        Args:
            error: The job's first failure, as all ranks have agreed.
        """
        # Looked up again: the script may have closed it, and opened something else.
        descriptor = _launchers_pipe(self._named)
        if descriptor is None:
            return
        report = Report(
            job=self._job,
            rank=self._rank,
            error=type(error).__name__,
            blames=error.rank if isinstance(error, errors.WorkerLost) else None,
            server=error.index if isinstance(error, errors.ServerLost) else None,
        )
        # Full, or nobody reads it any more: then the launcher has to guess.
        with contextlib.suppress(OSError):
            os.set_blocking(descriptor, False)
            os.write(descriptor, report.encode())


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
