"""The exchange of tasks' addresses between the launchers of several hosts.

    launcher 0   listens ─────────── all have arrived ── the list of all tasks ──┐
    launcher i   connects, with its tasks' addresses ────────────────────────────┴─ runs

All prove the job's secret. The ports are kept from the exchange on. `kerasdist doctor`
meets in the same way, and starts no job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kerasdist.cli.console import print_line
from kerasdist.cli.run.hosts import probe
from kerasdist.cli.run.hosts.places import TaskProcess, is_here
from kerasdist.cli.run.options import Host, NodeOptions
from kerasdist.cluster.address import address_fault, split_address
from kerasdist.errors import AuthenticationError, ClusterError, ProtocolError
from kerasdist.transport.base import Connection
from kerasdist.transport.deadline import Cancellation, Deadline
from kerasdist.transport.framing import read_record
from kerasdist.transport.log import LOGGER
from kerasdist.transport.rendezvous.dial import (
    Refused,
    Unanswered,
    answer,
    hello_of,
    refuse,
    register,
)
from kerasdist.transport.rendezvous.listener import Listener
from kerasdist.transport.rendezvous.waiting_notice import Absent, Sight, WaitingNotice

_SESSION, _PURPOSE = "kerasdist run", "node"
_KINDS = ("worker", "ps")
# Seconds between two attempts.
AGAIN_SECONDS = 0.5
_REPLY_SECONDS = 10.0
_BACKLOG = 1024


class RendezvousError(Exception):
    """The launchers can't begin a job together."""


@dataclass(frozen=True, kw_only=True)
class LauncherHello:
    """The hello of a launcher to host 0.

    Attributes:
        count: The number of launchers, as it was given.
        tasks: The addresses of its tasks, by kind.
        facts: The versions of its host; None if there will be a job.
    """

    count: int
    tasks: Mapping[str, tuple[str, ...]]
    facts: Mapping[str, str] | None = None

    @property
    def addresses(self) -> list[str]:
        """The addresses of its tasks."""
        return [text for some in self.tasks.values() for text in some]


@dataclass(frozen=True, kw_only=True)
class LauncherRoster:
    """The answer of host 0 to a launcher when all are there.

    Attributes:
        cluster: The addresses of all tasks, as `TF_CONFIG` has them.
        first: The index of the launcher's first task, by kind.
        facts: The versions of each host that is here, by its number; empty if there
            will be a job.
        refused: Why launchers were refused; empty if there will be a job.
    """

    cluster: Mapping[str, tuple[str, ...]]
    first: Mapping[str, int] = field(default_factory=lambda: {"worker": 0, "ps": 0})
    facts: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LocalPart(LauncherRoster):
    """The part of a job's tasks that this launcher starts, and the ports of all.

    Attributes:
        bound: Sockets that keep the ports of this launcher's tasks, by kind; empty if
            their hosts keep them.
    """

    bound: Mapping[str, Sequence[socket.socket]] = field(default_factory=dict)

    def address(self, task: TaskProcess) -> str:
        """Return the address of a task, `"host:port"`."""
        return self.cluster[task.kind][task.index]

    def listen(self, task: TaskProcess) -> contextlib.AbstractContextManager[Any]:
        """Return a socket that listens at the port of one of this launcher's tasks.

        It's a second one at this address: the first keeps the port for a task that is
        started again, and as it doesn't listen nothing connects to it meanwhile.

        Returns:
            The socket; a context manager of None where the task's host listens.

        Raises:
            OSError: The port is taken, for instance by a child of the task.
        """
        if not self.bound:
            return contextlib.nullcontext()
        kept = self.bound[task.kind][task.index - self.first[task.kind]]
        # A task that was lost can be started again at this address, though its
        # connections linger: `create_server` lets it be used again.
        return socket.create_server(
            kept.getsockname(), family=kept.family, backlog=_BACKLOG
        )


@contextlib.contextmanager
def alone(workers: int, servers: int) -> Iterator[LocalPart]:
    """Return all of a job that runs on this host; the ports are kept in the block.

    Args:
        workers: The largest number of workers.
        servers: Number of parameter servers.

    Raises:
        OSError: There are too few ports or descriptors.
    """
    with contextlib.ExitStack() as undo:
        counts = {"worker": workers, "ps": servers}
        cluster, sockets = _keep_ports("127.0.0.1", counts, undo)
        yield LocalPart(cluster=cluster, bound=sockets)


def _keep_ports(
    host: str, counts: Mapping[str, int], undo: contextlib.ExitStack
) -> tuple[dict[str, tuple[str, ...]], dict[str, list[socket.socket]]]:
    """Return addresses of tasks, by kind, and the sockets that keep their ports."""
    sockets = {
        kind: [undo.enter_context(probe.bound(host)) for _ in range(count)]
        for kind, count in counts.items()
        if count
    }
    named = Host(name=host).in_address
    addresses = {
        kind: tuple(f"{named}:{sock.getsockname()[1]}" for sock in some)
        for kind, some in sockets.items()
    }
    return addresses, sockets


@contextlib.contextmanager
def meeting(
    options: NodeOptions, workers: int, servers: int, secret: bytes
) -> Iterator[LocalPart]:
    """Meet the other launchers; the ports are kept in the block.

    Args:
        options: The settings.
        workers: Number of workers on this host.
        servers: Number of parameter servers on this host.
        secret: The job's secret.

    Raises:
        RendezvousError: They haven't met in time, or don't fit.
    """
    with contextlib.ExitStack() as undo:
        # Errors of the block aren't the rendezvous's.
        try:
            part = _meet(options, {"worker": workers, "ps": servers}, secret, undo)
        except (OSError, ClusterError) as error:
            hint = ""
            behind = getattr(error.__cause__, "errno", None)
            if errno.EADDRINUSE in (getattr(error, "errno", 0), behind):
                hint = (
                    ". If another launcher of this job runs on this machine, give each "
                    "its --node-rank"
                )
            raise RendezvousError(
                f"the rendezvous at {options.rendezvous} isn't possible: {error}{hint}"
            ) from error
        yield part


def _meet(
    options: NodeOptions,
    counts: Mapping[str, int],
    secret: bytes,
    undo: contextlib.ExitStack,
) -> LocalPart:
    host, port = split_address(options.rendezvous)
    here = options.rank == 0 or (options.rank is None and is_here(Host(name=host)))
    own = host if here else _own_address(host, port)
    addresses, sockets = _keep_ports(own, counts, undo)
    facts = None
    if options.only_looks:
        for sock in sockets["worker"]:
            sock.listen()  # before the others know of it, and look
        facts = probe.facts(os.getcwd(), [])
        # Each launcher runs its own part of the job, in a folder of its own.
        del facts["working folder"]
    exchange = _collect if here else _ask
    tasks = {kind: addresses.get(kind, ()) for kind in counts}
    mine = LauncherHello(count=options.count, tasks=tasks, facts=facts)
    return LocalPart(**vars(exchange(options, mine, secret)), bound=sockets)


def _own_address(host: str, port: int) -> str:
    """Return this host's address, as the rendezvous's host reaches it."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, _, _, target = found[0]
    with socket.socket(family, kind) as sock:
        sock.connect(target)  # sends nothing
        return str(sock.getsockname()[0])


@dataclass
class _OtherLauncher:
    """A launcher that has connected to this one.

    Attributes:
        rank: Its number, negative if it hasn't any yet.
        connection: The connection.
        hello: What it has sent.
    """

    rank: int
    connection: Connection
    hello: LauncherHello

    def __str__(self) -> str:
        """Return its name in messages."""
        addresses = self.hello.addresses
        where = split_address(addresses[0])[0] if addresses else "without tasks"
        return f"{'a host' if self.rank < 0 else f'host {self.rank}'} ({where})"


def _collect(
    options: NodeOptions, mine: LauncherHello, secret: bytes
) -> LauncherRoster:
    """Wait for the others at the rendezvous, and send them the list."""
    waiting = _LauncherWait(options)
    others: list[_OtherLauncher] = []
    refused: list[str] = []

    def look() -> Sight:
        here = sorted(others, key=lambda each: each.rank < 0)
        number = options.count - 1 - len(here)
        missing = [Absent(f"{number} of {options.count} hosts", "")] if number else []
        last = listener.refusals()[-1:]
        return Sight(missing, ", ".join(["host 0", *map(str, here)]), "".join(last))

    def drop_those_that_left() -> None:
        # One that was killed while it waited may come again, to its place.
        others[:] = [each for each in others if not each.connection.ended]

    with contextlib.ExitStack() as undo:
        listener = Listener.acquire(options.rendezvous, secret, float(options.seconds))
        undo.callback(listener.release)
        listener.enter(_SESSION)
        undo.enter_context(waiting.notice("host 0", look, goal=options.rendezvous))
        while True:
            drop_those_that_left()
            if len(others) == options.count - 1:
                break
            if options.only_looks and not waiting.remaining():
                break
            waiting.check(f"{len(others) + 1} of {options.count} hosts are here")
            arrived = listener.pending.take_any(_SESSION, _PURPOSE, AGAIN_SECONDS)
            # One that arrives may have been killed, and started again, in that time.
            drop_those_that_left()
            for rank, connection, value in arrived:
                undo.callback(connection.close)
                try:
                    hello = read_record(value, LauncherHello, "A hello")
                    fault = _fault(options, rank, hello, mine, others)
                except ProtocolError as error:
                    fault = str(error)
                if fault:
                    refused.append(fault)
                    if not options.only_looks:
                        print_line(f"a host was refused: {fault}", logging.WARNING)
                    refuse(connection, fault)
                else:
                    others.append(_OtherLauncher(rank, connection, hello))
        free = {*range(1, options.count)} - {each.rank for each in others}
        numbers = iter(sorted(free))
        for each in others:
            each.rank = next(numbers) if each.rank < 0 else each.rank
        others.sort(key=lambda each: each.rank)
        parts = [mine, *(each.hello for each in others)]
        addresses = {
            kind: tuple(text for part in parts for text in part.tasks[kind])
            for kind in _KINDS
        }
        ranks = [0, *(each.rank for each in others)]
        facts = [part.facts or {} for part in parts]
        roster = LauncherRoster(
            cluster={kind: some for kind, some in addresses.items() if some},
            facts=dict(zip(ranks, facts, strict=True)),
            refused=(*listener.refusals(), *refused),
        )
        for index, each in enumerate(others, 1):
            first = {
                kind: sum(len(part.tasks[kind]) for part in parts[:index])
                for kind in _KINDS
            }
            answer(each.connection, dataclasses.replace(roster, first=first))
        return roster


def _fault(
    options: NodeOptions,
    rank: int,
    hello: LauncherHello,
    mine: LauncherHello,
    others: Sequence[_OtherLauncher],
) -> str:
    """Return why a launcher can't take part; empty if it can.

    Args:
        options: Those of this launcher.
        rank: The other's, negative if it hasn't any.
        hello: What the other has sent.
        mine: What this one would send.
        others: Those that have arrived before.
    """
    if hello.count != options.count:
        return (
            f"it was started with --nnodes {hello.count}, and the host of the "
            f"rendezvous with --nnodes {options.count}"
        )
    if (hello.facts is not None) != options.only_looks:
        return (
            "one of `kerasdist run` and `kerasdist doctor` was started on it, and the "
            "other on the host of the rendezvous"
        )
    taken = {0, *(each.rank for each in others if each.rank >= 0)}
    if rank in taken or rank >= options.count:
        return f"there is a host with --node-rank {rank} already"
    if hello.tasks.keys() != set(_KINDS):
        return "it names no tasks"
    if not all(each.isprintable() for each in (hello.facts or {}).values()):
        return "it names no versions"
    # They go into every task's TF_CONFIG, and into messages.
    for address in hello.addresses:
        fault = address_fault(address)
        if fault is not None:
            return f"an address of a task {fault} (received: {address!r})"
    named = [*mine.addresses, *hello.addresses]
    named += [text for each in others for text in each.hello.addresses]
    if len(set(named)) < len(named):
        return "it names an address that another task has"
    return ""


def _ask(options: NodeOptions, mine: LauncherHello, secret: bytes) -> LauncherRoster:
    """Connect to the rendezvous, and wait for the list."""
    waiting = _LauncherWait(options)
    hello = hello_of(
        _SESSION, _PURPOSE, -1 if options.rank is None else options.rank, mine
    )
    connected = threading.Event()
    me = "this host" if options.rank is None else f"host {options.rank}"
    # Host 0 goes on without others at the end of its own time, which began earlier than
    # the connection.
    grace = options.seconds + _REPLY_SECONDS if options.only_looks else 0.0

    def look() -> Sight:
        if connected.is_set():
            others = Absent("other hosts", "", "host 0 waits for them, see its output")
            return Sight([others], "host 0")
        return Sight([Absent("host 0", options.rendezvous)])

    with waiting.notice(me, look):
        while True:
            try:
                connection, roster = register(
                    *(options.rendezvous, secret, hello, LauncherRoster, waiting),
                    *(Cancellation(), grace, connected),
                )
                connection.close()
                return roster
            except Refused as error:
                raise RendezvousError(f"host 0 has refused this one: {error}") from None
            except (AuthenticationError, ProtocolError) as error:
                raise RendezvousError(
                    f"the process at {options.rendezvous} isn't the launcher of this "
                    f"job: {error}"
                ) from error
            except Unanswered:
                missing = "other hosts aren't here"
            except (OSError, EOFError) as error:
                reason = str(error) or type(error).__name__
                missing = f"host 0 isn't at {options.rendezvous} yet ({reason})"
            waiting.check(missing)
            time.sleep(AGAIN_SECONDS)


class _LauncherWait(Deadline):
    """The time that a launcher waits."""

    def __init__(self, options: NodeOptions) -> None:
        super().__init__(float(options.seconds))
        self._options = options
        self._command = f"Start the same command on all {options.count} hosts"

    def notice(
        self, me: str, look: Callable[[], Sight], goal: str = ""
    ) -> WaitingNotice:
        """Return what logs from time to time that this launcher waits."""
        return WaitingNotice(
            me,
            look,
            self,
            goal=goal,
            option="--start-timeout",
            hint=f"{self._command}.",
            logger=LOGGER if self._options.only_looks else LOGGER.getChild("run"),
        )

    def check(self, what: str) -> None:
        """Raise an error that tells what is the case, when the time is over."""
        if not self.remaining():
            raise RendezvousError(
                f"{what}, after {self.seconds:g} s (--start-timeout). {self._command}"
            )
