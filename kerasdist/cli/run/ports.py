"""The ports of a job's tasks, on which the launcher listens before the tasks do."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence

from kerasdist.cli.run.hosts.places import Place
from kerasdist.cli.run.nodes.rendezvous import LocalPart
from kerasdist.cli.run.task_processes import JobSpec, TaskProcess


class JobPorts:
    """One port of this machine for each task of a job, also for those added later.

    Args:
        job: The job.
        keep: Whether ports remain the job's when their tasks have ended, so that
            `listen_again` finds them free. Connections to such a port are refused.
    """

    def __init__(self, job: JobSpec, *, keep: bool = False) -> None:
        self._job = job
        self._keep = keep
        self._addresses: dict[TaskProcess, tuple[str, int]] = {}
        self._kept = contextlib.ExitStack()

    @property
    def cluster(self) -> dict[str, list[str]]:
        """The addresses of all tasks, as `TF_CONFIG` has them."""
        cluster: dict[str, list[str]] = {}
        for task in self._job.all_tasks:
            cluster.setdefault(task.kind, []).append(self.address(task))
        return cluster

    def address(self, task: TaskProcess) -> str:
        """Return the address of a task, `"host:port"`."""
        host, port = self._addresses[task]
        return f"{host}:{port}"

    @contextlib.contextmanager
    def listen(self) -> Iterator[Sequence[socket.socket | None]]:
        """Listen at a new port for each task; the sockets are closed with the block.

        Raises:
            OSError: There are too few ports or descriptors.
        """
        with contextlib.ExitStack() as listeners:
            yield [
                listeners.enter_context(self._new_port(task))
                for task in self._job.all_tasks
            ]

    def _new_port(self, task: TaskProcess) -> socket.socket:
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(socket.socket())
            sock.bind(("127.0.0.1", 0))
            # A task that was lost can be started again at this address, though its
            # connections linger. Not before `bind`: ports would be shared.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._addresses[task] = sock.getsockname()
            if self._keep:
                # Bound, but it doesn't listen: the system gives the port to no other
                # process, and no process connects to it in the task's place. Only
                # before the other socket listens can it be bound.
                self._kept.enter_context(self._bound(task))
            sock.listen(1024)
            undo.pop_all()
        return sock

    def _bound(self, task: TaskProcess) -> socket.socket:
        return _bound_again(socket.AF_INET, self._addresses[task])

    @contextlib.contextmanager
    def listen_again(self, task: TaskProcess) -> Iterator[socket.socket | None]:
        """Listen at the port of a task that has ended; closed with the block.

        Raises:
            OSError: The port is taken, for instance by a child of the task.
        """
        with self._listening(task) as sock:
            yield sock

    def _listening(self, task: TaskProcess) -> socket.socket:
        sock = self._bound(task)
        try:
            sock.listen(1024)
        except OSError:
            sock.close()
            raise
        return sock

    def close(self) -> None:
        """Give the ports back."""
        self._kept.close()


class HostPorts(JobPorts):
    """The ports of tasks on several hosts, each of which listens for its own tasks.

    Args:
        job: The job.
        places: The place of each task, by kind and index.
    """

    def __init__(self, job: JobSpec, places: Mapping[tuple[str, int], Place]) -> None:
        super().__init__(job)
        self._places = places

    def address(self, task: TaskProcess) -> str:
        """Return the address of a task, `"host:port"`."""
        return self._places[task.kind, task.index].text

    @contextlib.contextmanager
    def listen(self) -> Iterator[Sequence[None]]:
        """Yield no socket for each task."""
        yield [None for _ in self._job.all_tasks]

    @contextlib.contextmanager
    def listen_again(self, task: TaskProcess) -> Iterator[None]:
        """Yield no socket."""
        yield None


class PartPorts(JobPorts):
    """The ports of the tasks of one launcher of several, which are kept already.

    Args:
        job: The part of the job.
        part: Its place in the whole one.
    """

    def __init__(self, job: JobSpec, part: LocalPart) -> None:
        super().__init__(job)
        self._part = part

    @property
    def cluster(self) -> dict[str, list[str]]:
        """The addresses of all tasks, also of the other launchers'."""
        return self._part.cluster

    def address(self, task: TaskProcess) -> str:
        """Return the address of a task, `"host:port"`."""
        return self._part.cluster[task.kind][task.index]

    @contextlib.contextmanager
    def listen(self) -> Iterator[Sequence[socket.socket]]:
        """Listen at the ports that are kept; closed with the block.

        Raises:
            OSError: There are too few descriptors.
        """
        with contextlib.ExitStack() as listeners:
            yield [
                listeners.enter_context(self._listening(task))
                for task in self._job.tasks
            ]

    def _bound(self, task: TaskProcess) -> socket.socket:
        first = self._part.first[task.kind]
        kept = self._part.bound[task.kind][task.index - first]
        return _bound_again(kept.family, kept.getsockname())


def _bound_again(family: int, address: tuple[str | int, ...]) -> socket.socket:
    """Return a second socket at an address that another one keeps for the job."""
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock
