"""The output of an elastic job's present chief, in the place of that of rank 0.

The first chief has the terminal. When another worker becomes the chief, its output is
shown from where the output of the former chief ended; until then it was only written to
its log, or shown with its tag.
"""

from __future__ import annotations

from kerasdist.cli.run.output import LineTagger, OutputPump, WholeLines
from kerasdist.cli.run.task_processes import JobSpec, TaskProcess

_MOST_KEPT = 64 * 1024


class RoleLines:
    """Cuts one task's output as its present role requires: see `LineTagger`.

    Only the pump's thread calls its methods. They get the monotonic time in seconds.

    Args:
        tag: The beginning of each line while the worker isn't the chief; None: nothing
            is shown then.
        is_chief: Whether it begins as the chief.
    """

    def __init__(self, tag: bytes | None, *, is_chief: bool) -> None:
        self._tagger = None if tag is None else LineTagger(tag)
        self._whole = WholeLines()
        self._is_chief = is_chief
        self._in_line = False
        # While nothing is shown: the line that isn't finished, or, without a chief,
        # all since then.
        self._kept = b""
        self._keeps_all = False

    def feed(self, data: bytes, now: float) -> bytes:
        """Add output of the worker, and return what is to be shown of it."""
        if self._is_chief:
            return self._shown(self._whole.feed(data, now))
        if self._tagger is not None:
            return self._tagger.feed(data, now)
        self._kept += data
        if not self._keeps_all:
            end = max(self._kept.rfind(b"\n"), self._kept.rfind(b"\r")) + 1
            self._kept = self._kept[end:]
        self._kept = self._kept[-_MOST_KEPT:]
        return b""

    def flush(self) -> bytes:
        """Return what has no line end yet, if it is to be shown."""
        if self._is_chief:
            return self._shown(self._whole.flush())
        return b"" if self._tagger is None else self._tagger.flush()

    def keep_all(self, now: float) -> bytes:
        """Keep what follows, for `begin`: the chief has ended."""
        del now
        self._keeps_all = True
        return b""

    def begin(self, now: float) -> bytes:
        """Become the chief; return what is to be shown at once."""
        if self._is_chief:
            return b""
        self._is_chief = True
        kept = self._kept if self._tagger is None else self._tagger.take()
        self._kept = b""
        return self._shown(self._whole.feed(kept, now))

    def end(self, now: float) -> bytes:
        """Be the chief no longer; return the end of the line."""
        del now
        if not self._is_chief:
            self._keeps_all = False
            return b""
        rest = self.flush()
        self._is_chief = self._keeps_all = False
        return rest + (b"\n" if self._in_line else b"")

    def _shown(self, data: bytes) -> bytes:
        if data:
            self._in_line = not data.endswith(b"\n")
        return data


class ChiefOutput:
    """Shows the output of the present chief.

    Args:
        job: The job.
        pump: Copies the output of its workers.

    Attributes:
        chief: Rank of the present chief.
    """

    def __init__(self, job: JobSpec, pump: OutputPump) -> None:
        self.chief = 0
        self._tagged = job.tagged
        self._pump = pump
        self._lines: dict[int, RoleLines] = {}  # by rank

    def lines_of(self, task: TaskProcess) -> RoleLines:
        """Return what cuts the output of a task that is being started."""
        tag = f"[{task.tag}] ".encode() if self._tagged else None
        if task.is_server:
            return RoleLines(tag, is_chief=False)
        lines = RoleLines(tag, is_chief=task.index == self.chief)
        self._lines[task.index] = lines
        return lines

    def chief_ended(self) -> None:
        """Keep the others' output until one of them is the chief."""
        for lines in self._lines.values():
            self._pump.call(lines.keep_all)

    def show(self, rank: int) -> None:
        """Show the output of the new chief, instead of the former one's."""
        self.chief = rank
        # The others' first: the former chief's may have to end a line.
        for other, lines in self._lines.items():
            if other != rank:
                self._pump.call(lines.end)
        if rank in self._lines:
            self._pump.call(self._lines[rank].begin)
