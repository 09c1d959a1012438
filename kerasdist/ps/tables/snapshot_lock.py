"""A lock that lets one server at a time keep its snapshots at a path.

A file beside the snapshot is locked (`flock`) while the server runs. The system
releases the lock when the process ends in any way; a file that is left over locks
nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path

from kerasdist.errors import SnapshotError
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.forks import close_in_children
from kerasdist.transport.log import background_log

_PAUSE_SECONDS = 0.05
# Errors of file systems without locks.
_NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)


class SnapshotLock:
    """The right to keep a snapshot at a path, held from the constructor to `release`.

    Args:
        path: The snapshot's; its folder is made if it isn't there.
        seconds: How long to wait for it: a server that was killed may take a moment to
            end when the next one runs already.

    Raises:
        SnapshotError: Another process holds it, or the folder can't be written to.
    """

    def __init__(self, path: Path, seconds: float = 2.0) -> None:
        self._path = path.with_name(f".{path.name}.lock")
        self._descriptor = -1
        deadline = Deadline(seconds)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            while not self._take():
                if deadline.expired:
                    raise SnapshotError(
                        f"Another server keeps its snapshots at {path}: "
                        f"{self._owner()}. "
                        f"Received: snapshot_dir={str(path.parent)!r}. Give each job a "
                        "folder of its own; if it is the one that this server "
                        "replaces, end it first."
                    )
                time.sleep(_PAUSE_SECONDS)
        except OSError as error:
            raise SnapshotError(
                f"A snapshot can't be written to {path}: {error.strerror or error}. Is "
                "there room, and may this process write there?"
            ) from error
        # A forked child would hold the lock while it runs.
        close_in_children(self)

    def _take(self) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                background_log.log(
                    logging.WARNING,
                    "kerasdist: %s can't be locked (%s): take care that no other job "
                    "has this `snapshot_dir`.",
                    *(self._path, error.strerror),
                )
            else:
                os.close(descriptor)
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                return False
        # Another server may have removed the file before it released the lock.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.lstat(self._path)):
                owner = {"process": os.getpid(), "host": socket.gethostname()}
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(owner).encode(), 0)
                self._descriptor = descriptor
                return True
        os.close(descriptor)
        return False

    def _owner(self) -> str:
        try:
            owner = json.loads(self._path.read_bytes()[:1000])
            return f"process {owner['process']} on {owner['host']}"
        except (OSError, ValueError, LookupError, TypeError):
            return "an unknown process"

    def release(self) -> None:
        """Release the lock, and remove the file. Can be called twice."""
        if self._descriptor >= 0:
            # While it's still locked: no other server may take it in between.
            with contextlib.suppress(OSError):
                self._path.unlink()
            self.close()

    def close(self) -> None:
        """Close the descriptor only."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
