"""The writer of a server's snapshots, and the restart from one.

A thread of its own writes at intervals of time or updates, from a copy of each table,
so that the workers are served meanwhile. A job that ends well removes its snapshots:
only one that was interrupted is continued from them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kerasdist.collectives.row_exchange import Array
from kerasdist.errors import ProtocolError, SnapshotError
from kerasdist.parameter_server.layout import Layout, ServerSettings, Variable
from kerasdist.parameter_server.membership import Membership, WorkerRecord
from kerasdist.parameter_server.served_table import ServedTable
from kerasdist.parameter_server.tables import ServedTables
from kerasdist.transport import log
from kerasdist.transport.array_file import read_arrays, remove_parts, write_arrays
from kerasdist.transport.deadline import Deadline, daemon
from kerasdist.transport.framing import read_record, to_object
from kerasdist.transport.memory import close_in_children

# The content of a snapshot.


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableRecord:
    """One table in a snapshot.

    Attributes:
        variables: Its variables.
        version: The version of its values.
        clocks: The clocks of live workers, by rank.
        applied: See `ServedTable.applied`.
    """

    variables: tuple[Variable, ...]
    version: int
    clocks: Mapping[int, int]
    applied: Mapping[int, tuple[str, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotRecord:
    """A snapshot without its arrays.

    Attributes:
        job: The server and its settings: only the same job continues from it.
        tables: The tables, by number.
        workers: The workers.
        updates: Number of updates of all tables.
        seed: See `ServedTables.seed`.
    """

    job: Any
    tables: Mapping[int, TableRecord]
    workers: tuple[WorkerRecord, ...]
    updates: int
    seed: int


def path_of(folder: str, server: int) -> Path:
    """Return the path of the snapshot of server number `server`."""
    return Path(folder) / f"server-{server}.snapshot"


def write_snapshot(
    path: Path, header: Mapping[str, Any], arrays: Sequence[Array]
) -> int:
    """Write a snapshot in the place of the last one; return its number of bytes.

    Args:
        path: The file; its folder is made if it isn't there.
        header: A JSON object.
        arrays: Arrays of numbers.

    Raises:
        SnapshotError: It can't be written; the last one is unchanged.
    """
    with _naming(f"A snapshot can't be written to {path}", _ROOM):
        return write_arrays(path, header, arrays)


# What may be the cause of an error in writing.
_ROOM = " Is there room, and may this process write there?"


@contextlib.contextmanager
def _naming(what: str, hint: str = "") -> Iterator[None]:
    """Turn an error of the file system into a `SnapshotError`."""
    try:
        yield
    except OSError as error:
        raise SnapshotError(f"{what}: {error.strerror or error}.{hint}") from error


def read_snapshot(path: Path) -> tuple[dict[str, Any], list[Array]] | None:
    """Return a snapshot's header and arrays; None if there is none.

    Raises:
        SnapshotError: It is damaged, or no snapshot of this version.
    """
    with _naming(f"The snapshot {path} can't be read"):
        try:
            return read_arrays(path)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise _unusable(path, str(error)) from error


def remove_snapshot(path: Path) -> None:
    """Remove a snapshot that isn't needed any more, if there is one.

    Raises:
        SnapshotError: It can't be removed.
    """
    with _naming(f"The snapshot {path} can't be removed"):
        path.unlink(missing_ok=True)


def _unusable(path: Path, why: str) -> SnapshotError:
    return SnapshotError(
        f"The snapshot {path} can't be used: {why}. Remove it to start from scratch, "
        "or give another `snapshot_dir`."
    )


# A lock that lets one server at a time keep its snapshots at a path.
#
# A file beside the snapshot is locked (`flock`) while the server runs. The system
# releases the lock when the process ends in any way; a file that is left over locks
# nothing.

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
        with _naming(f"A snapshot can't be written to {path}", _ROOM):
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
        # A forked child would hold the lock while it runs.
        close_in_children(self)

    def _take(self) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                log.log_in_background(
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


_CLOSE_SECONDS = 60.0
# A job that is idle needs no more snapshots; the thread looks this often.
_LONGEST_WAIT = 3600.0


class Snapshotter:
    """Writes snapshots of one server's tables.

    Args:
        server: Index of the server.
        servers: Number of servers.
        settings: `snapshot_dir` and the intervals.
        membership: The workers.
        tables: The tables.

    Attributes:
        written: Number of snapshots written.
    """

    def __init__(
        self,
        server: int,
        servers: int,
        settings: ServerSettings,
        membership: Membership,
        tables: ServedTables,
    ) -> None:
        self.written = 0
        self.path = path_of(str(settings.snapshot_dir), server)
        self._server = server
        self._servers = servers
        self._settings = settings
        self._membership = membership
        self._tables = tables
        self._requested = threading.Event()
        self._due = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._lock: SnapshotLock | None = None

    def resume(self) -> bool:
        """Restore the tables from the snapshot; return False if there is none.

        From now on no other server can keep its snapshots there. The workers of the
        snapshot are away until they reconnect.

        Raises:
            SnapshotError: It can't be used, or another server uses it.
        """
        self._lock = SnapshotLock(self.path)
        try:
            remove_parts(self.path)
            return self._resume()
        except BaseException:
            self._lock.release()
            raise

    def _resume(self) -> bool:
        found = read_snapshot(self.path)
        if found is None:
            return False
        header, arrays = found
        mine = self._job()
        theirs = header.get("job")
        if theirs != mine:
            raise SnapshotError(
                f"The snapshot {self.path} is of another job. Received: {theirs}, "
                f"expected {mine}. Remove it to start from scratch, or give another "
                "`snapshot_dir`."
            )
        try:
            self._take(read_record(header, SnapshotRecord, "Its header"), arrays)
        except (ValueError, IndexError, ProtocolError) as error:
            why = f"{type(error).__name__}: {error}".rstrip(".")
            raise _unusable(self.path, why) from error
        log.log_in_background(
            logging.WARNING,
            "kerasdist: server %d continues from its snapshot %s (%d updates), not "
            "from the script's initial weights. To start from scratch, end the job and "
            "remove that file.",
            *(self._server, self.path, self._tables.updates),
        )
        return True

    def _job(self) -> dict[str, Any]:
        return {
            "server": self._server,
            "servers": self._servers,
            "size": len(self._membership.workers),
            "settings": self._settings.agreed(),
        }

    def _take(self, record: SnapshotRecord, arrays: list[Array]) -> None:
        left = list(arrays)
        for number, table in record.tables.items():
            layout = Layout(table.variables, self._servers)
            bound = self._settings.max_staleness
            served = ServedTable(layout, self._server, [], bound)
            own = [*served.table.dense, *served.table.rows, *served.table.versions]
            for mine in own:
                array = left.pop(0)
                if array.shape != mine.shape or array.dtype != mine.dtype:
                    raise ValueError(f"an unexpected array of shape {array.shape}")
                mine[...] = array
            served.table.version = table.version
            for rank, clock in table.clocks.items():
                served.clocks.join(rank, clock)
            for rank, (incarnation, clock) in table.applied.items():
                served.applied[rank] = (incarnation, clock)
                # It leaves out workers that aren't live any more.
                served.clocks.tick(rank, clock)
            self._tables.tables[number] = served
        for worker in record.workers:
            state = "away" if worker.state == "live" else worker.state
            self._membership.workers[worker.rank] = dataclasses.replace(
                worker, state=state, returned=True, joining=False, left=0
            )
        self._tables.updates = record.updates
        self._tables.seed = record.seed

    def start(self) -> None:
        """Begin to write snapshots."""
        self._thread = daemon(f"kerasdist-keeper {self._server}", self._run)
        self._thread.start()

    def request(self, *, at_once: bool = False) -> None:
        """Wake the thread after a change, to write a snapshot if one is due.

        Args:
            at_once: Whether one is due at once: a table is new, or a worker.
        """
        if self._settings.snapshot_updates is None and not at_once:
            return
        if at_once:
            self._due = True
        self._requested.set()

    def _run(self) -> None:
        settings = self._settings
        seconds, updates = settings.snapshot_seconds, settings.snapshot_updates
        at, count = time.monotonic(), self._tables.updates
        while True:
            left = _LONGEST_WAIT
            if seconds is not None:
                left = max(0.0, at + seconds - time.monotonic())
            self._requested.wait(left)
            # Before it's looked at what has changed: later changes wake it again.
            self._requested.clear()
            if self._closed:
                return
            if due := self._due:
                self._due = False
            done = self._tables.updates
            late = seconds is not None and time.monotonic() - at >= seconds
            many = updates is not None and done - count >= updates
            if due or many or (late and done != count):
                try:
                    self.write()
                except SnapshotError as error:
                    self._log(error)
                count = done
                at = time.monotonic()
            elif late:
                at = time.monotonic()

    def write(self) -> int:
        """Write a snapshot now; return its number of bytes.

        Raises:
            SnapshotError: It can't be written; the last one is unchanged.
        """
        members = self._membership
        with members.changed:
            every = dict(self._tables.tables)
            clocks = {number: s.clocks.live for number, s in every.items()}
            workers = tuple(
                dataclasses.replace(worker, state="live")
                if worker.state == "away"
                else dataclasses.replace(worker)
                for worker in members.workers
            )
        tables = {}
        arrays: list[Array] = []
        for number, served in every.items():
            with served.lock:
                arrays += served.whole()
                arrays += [versions.copy() for versions in served.table.versions]
                tables[number] = TableRecord(
                    variables=served.layout.variables,
                    version=served.table.version,
                    clocks=clocks[number],
                    applied=dict(served.applied),
                )
        record = SnapshotRecord(
            job=self._job(),
            tables=tables,
            workers=workers,
            updates=self._tables.updates,
            seed=self._tables.seed,
        )
        size = write_snapshot(self.path, to_object(record), arrays)
        self.written += 1
        return size

    def close(self, *, finished: bool) -> None:
        """End the thread.

        Args:
            finished: Whether the job has ended well: then the snapshot is removed.
        """
        self._closed = True
        self._requested.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        if finished:
            try:
                remove_snapshot(self.path)
            except SnapshotError as error:
                self._log(error)
        # A thread that hangs in a dead network disk may still write there.
        ended = self._thread is None or not self._thread.is_alive()
        if self._lock is not None and ended:
            self._lock.release()

    def _log(self, error: SnapshotError) -> None:
        log.log_in_background(
            logging.ERROR, "kerasdist: server %d: %s", self._server, error
        )
