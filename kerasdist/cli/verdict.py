"""What the workers say about whose fault the end of their job is.

They say it on one pipe, see `kerasdist.transport.report`. It counts for more than the
order in which their processes end.
"""

from __future__ import annotations

import os

from kerasdist.transport.report import REPORT_VARIABLE, Report, pipe_in_words

__all__ = ["Verdict"]


class Verdict:
    """The pipe, and what was read from it.

    Attributes:
        reading: Its end to read from, which doesn't block. It never comes to an
            end, because the other end stays open here.
        writing: Its end for the workers.
    """

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)
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
                report = Report.decode(line)
                if report is not None:
                    # The first word counts: later ones may be about a rank that has
                    # given up because of it.
                    self._by_job.setdefault(report.job, report)
                    self._job = report.job

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
