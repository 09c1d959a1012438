"""The cause of a job's failure, from its processes' reports, outputs and exits.

When one rank fails, the others fail because of it, and the processes don't always end
in the order in which they failed: a rank with an exception closes its connections
first; its peers notice that, fail and end at once, while it still tidies up. So the
cause that the workers agreed on counts: they report it on one pipe (`JobOutcome`, see
`kerasdist.transport.liveness.launcher_pipe`). Without a report, as when they weren't
connected yet, their outputs may show it (`first_failure`). The order of exits is only
used where nothing better is known, as with the chief, whose output the launcher
doesn't see.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterable

from kerasdist.cli.run.output import is_consequence, last_traceback
from kerasdist.transport.liveness.launcher_pipe import (
    REPORT_VARIABLE,
    Notice,
    Report,
    pipe_in_words,
)

__all__ = ["Failure", "JobOutcome", "exit_code", "first_failure", "in_words"]


class JobOutcome:
    """The pipe on which processes report, and what was read from it.

    Args:
        servers: Number of parameter servers of the job.

    Attributes:
        reading: Its end to read from, which doesn't block. It never reaches the end
            of file, because the other end stays open here.
        writing: Its end for the workers and servers.
        patience: How many seconds the job waits for a lost server; 0: not at all.
        gave_up: Ranks that failed because the servers had lost them before.
    """

    def __init__(self, servers: int = 0) -> None:
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)
        self.patience = 0.0
        self.gave_up: set[int] = set()
        self._servers = servers
        self._begun: set[int] = set()
        self._lost: set[tuple[int, int | None]] = set()
        self._failed = False
        self._notices: list[Notice] = []
        self._pending = b""
        self._by_job: dict[str, Report] = {}
        self._job: str | None = None

    @property
    def environ(self) -> dict[str, str]:
        """The variable that names `writing` to a worker that inherits it."""
        return {REPORT_VARIABLE: pipe_in_words(self.writing)}

    def read(self) -> None:
        """Read the reports that have arrived, without waiting."""
        while True:
            try:
                data = os.read(self.reading, 65536)
            except BlockingIOError:
                return
            *lines, self._pending = (self._pending + data).split(b"\n")
            for line in lines:
                report, notice = Report.decode(line), Notice.decode(line)
                if report is not None:
                    self._take_report(report)
                elif notice is not None:
                    self._take_notice(notice)

    def _take_report(self, report: Report) -> None:
        if self.goes_on and any(rank == report.rank for _, rank in self._lost):
            # For instance, it was frozen, the others continued, and it wakes up.
            self.gave_up.add(report.rank)
            return
        if self.goes_on and report.rank == report.blames:
            return
        # Servers don't report that another server was lost for good; workers do.
        self._failed = True
        # The first report counts: later ones may name a rank that failed because of
        # it.
        self._by_job.setdefault(report.job, report)
        self._job = report.job

    def _take_notice(self, notice: Notice) -> None:
        if notice.kind == "begun":
            self._begun.add(notice.server)
            self.patience = notice.patience
        elif notice.kind == "failed":
            self._failed = True
        else:
            key = notice.server, notice.rank
            if notice.kind == "lost":
                self._lost.add(key)
            else:
                self._lost.discard(key)
            if notice.server == 0:  # the others report the same, sooner or later
                self._notices.append(notice)

    @property
    def goes_on(self) -> bool:
        """Whether the job continues without lost workers: all servers reported that."""
        return 0 < self._servers <= len(self._begun) and not self._failed

    def notices(self) -> list[Notice]:
        """Return server 0's notices about workers since the last call."""
        found, self._notices = self._notices, []
        return found

    @property
    def blamed(self) -> int | None:
        """The rank that was reported as the cause; None if there is no report.

        Of several jobs the last to fail counts: the script has survived the others.
        """
        return None if self._job is None else self._by_job[self._job].blames

    @property
    def blamed_server(self) -> int | None:
        """The index of the server that was reported as the cause; None if none was."""
        return None if self._job is None else self._by_job[self._job].server


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank that ended by itself, with a failure.

    Attributes:
        rank: The rank; servers are counted after the last one.
        code: Its exit code; negative for a signal, as `subprocess` has it.
        ended_at: When its process ended, in ns since the epoch.
        output: The end of its output; empty if we don't see it (the chief's).
        written_at: When it last wrote something, in ns since the epoch.
    """

    rank: int
    code: int
    ended_at: int
    output: str = ""
    written_at: int = 0

    @property
    def failed_at(self) -> int:
        """The estimated time of the failure, in ns since the epoch."""
        if last_traceback(self.output) is None:
            return self.ended_at
        return min(self.ended_at, self.written_at)


def first_failure(
    failures: Iterable[Failure], blamed: int | None = None
) -> Failure | None:
    """Return the failure that caused the others; None if there are none.

    A rank that reports the loss of another one isn't it, unless all report one.

    Args:
        failures: All of them.
        blamed: The rank that the workers report as the cause. It counts if it failed.
    """
    return min(
        failures,
        key=lambda failure: (
            failure.rank != blamed,
            is_consequence(failure.output),
            failure.failed_at,
        ),
        default=None,
    )


def exit_code(code: int) -> int:
    """Return a code as a shell shows it: 128 + the number for a signal."""
    return 128 - code if code < 0 else code


def in_words(code: int) -> str:
    """Describe how a process with this code (negative for a signal) ended."""
    if code >= 0:
        return f"failed with exit code {code}"
    try:
        name = f"{signal.Signals(-code).name} ({-code})"
    except ValueError:
        name = str(-code)
    hint = ""
    if -code == signal.SIGKILL:
        hint = ", sent by another process, or by the system when memory ran out"
    return f"was ended by signal {name}{hint}"
