"""Whose fault the end of a job is: what its processes reported, and what was seen.

When one rank fails, the others fail because of it, and the processes needn't end in
the order in which things went wrong: a rank with an exception closes its connections
first, its peers see that, fail and end at once, while it still tidies up. So what
the workers have agreed on counts: they report it on one pipe (`JobOutcome`, see
`kerasdist.transport.liveness.launcher_pipe`). Without it, as when they weren't
connected yet, their outputs may tell (`first_failure`); the order of exits is only used
where nothing better is known, and of the chief nothing better is: its output isn't ours
to see.
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
    """The pipe, and what was read from it.

    Args:
        servers: Number of parameter servers of the job.

    Attributes:
        reading: Its end to read from, which doesn't block. It never comes to an
            end, because the other end stays open here.
        writing: Its end for the workers and servers.
        patience: How many seconds the job waits for a lost server; 0: not at all.
        gave_up: Ranks that have failed because the servers had lost them before.
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
        """What tells a worker that inherits `writing` where it is."""
        return {REPORT_VARIABLE: pipe_in_words(self.writing)}

    def read(self) -> None:
        """Read what has come; waits for nothing."""
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
            # It was frozen, say; the others have gone on, and it wakes up.
            self.gave_up.add(report.rank)
            return
        if self.goes_on and report.rank == report.blames:
            return
        # That a server hasn't come back isn't said by servers.
        self._failed = True
        # The first word counts: later ones may be about a rank that has given up
        # because of it.
        self._by_job.setdefault(report.job, report)
        self._job = report.job

    def _take_notice(self, notice: Notice) -> None:
        if notice.kind == "begun":
            self._begun.add(notice.server)
            self.patience = notice.patience
        elif notice.kind == "failed":
            self._failed = True
        else:
            who = notice.server, notice.rank
            if notice.kind == "lost":
                self._lost.add(who)
            else:
                self._lost.discard(who)
            if notice.server == 0:  # the others see the same, sooner or later
                self._notices.append(notice)

    @property
    def goes_on(self) -> bool:
        """Whether the job goes on without lost workers, as all servers must say."""
        return 0 < self._servers <= len(self._begun) and not self._failed

    def notices(self) -> list[Notice]:
        """What has happened to workers since the last call, as server 0 tells."""
        found, self._notices = self._notices, []
        return found

    @property
    def blamed(self) -> int | None:
        """The rank to blame; None if nobody has said so.

        Of several jobs the last to fail counts: the script has survived the others.
        """
        return None if self._job is None else self._by_job[self._job].blames

    @property
    def blamed_server(self) -> int | None:
        """The same of the parameter servers, by index."""
        return None if self._job is None else self._by_job[self._job].server


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank that ended by itself, and not well.

    Attributes:
        rank: The rank; servers come after the last one.
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
        """When it went wrong, as far as can be told, in ns since the epoch."""
        if last_traceback(self.output) is None:
            return self.ended_at
        return min(self.ended_at, self.written_at)


def first_failure(
    failures: Iterable[Failure], blamed: int | None = None
) -> Failure | None:
    """Return the failure that caused the others; None if there are none.

    A rank that says it has lost another one isn't it, unless all say so.

    Args:
        failures: All of them.
        blamed: The rank that the workers say is to blame. It counts if it has failed.
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
    """Return what a shell would say: 128 + the number for a signal."""
    return 128 - code if code < 0 else code


def in_words(code: int) -> str:
    """Say how a process with this code (negative for a signal) ended."""
    if code >= 0:
        return f"failed with exit code {code}"
    try:
        name = f"{signal.Signals(-code).name} ({-code})"
    except ValueError:
        name = str(-code)
    hint = ""
    if -code == signal.SIGKILL:
        hint = ", sent by someone else or by the system when memory ran out"
    return f"was ended by signal {name}{hint}"
