"""Which tests may run at the same time, where several processes run parts of them.

`pytest -n 3` (pytest-xdist) runs three files of tests at once. A test with the marker
`alone` measures how fast something is: while it runs, the other processes wait.

    test             gate        room
    any              take        share
                     give back
                     ... runs ...
                                 give back
    marked `alone`   take        take      (waits for those that run now)
                     ... runs ...          (the next ones wait at the gate)
                     give back   give back
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["Turns"]


class Turns:
    """What the processes that run tests at the same time tell each other.

    Args:
        folder: One for all of them, which exists.
    """

    def __init__(self, folder: Path) -> None:
        self._gate = folder / "gate"
        self._room = folder / "room"

    @contextlib.contextmanager
    def one(self, *, alone: bool) -> Iterator[None]:
        """Waits until a test may run, and keeps its place as long as it does."""
        with _locked(self._gate, fcntl.LOCK_EX) as leave:
            how = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
            with _locked(self._room, how):
                if not alone:
                    leave()
                yield


@contextlib.contextmanager
def _locked(path: Path, how: int) -> Iterator[Callable[[], None]]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    # Given back by name: a fork of this process that lives on holds it, too.
    try:
        fcntl.flock(fd, how)
        yield lambda: fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
