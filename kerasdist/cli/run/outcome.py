"""What workers and servers say about their job, and whose fault its end is.

They say it on one pipe, see `kerasdist.transport.liveness.launcher_pipe`. It counts for
more than the order in which their processes end.
"""

from __future__ import annotations

import os

from kerasdist.transport.liveness.launcher_pipe import (
    REPORT_VARIABLE,
    Notice,
    Report,
    pipe_in_words,
)

__all__ = ["Verdict"]


class Verdict:
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
