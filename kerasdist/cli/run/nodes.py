"""The exchange of tasks' addresses between the launchers of several hosts.

    launcher 0   listens ─────────── all have arrived ── the list of all tasks ──┐
    launcher i   connects, with its tasks' addresses ────────────────────────────┴─ runs

All prove the job's secret. The ports are kept from the exchange on. `kerasdist doctor`
meets in the same way, and starts no job.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kerasdist.cli.console import print_line
from kerasdist.cli.run.hosts import probe
from kerasdist.cli.run.hosts.places import is_here
from kerasdist.cli.run.options import Host, NodeOptions
from kerasdist.cluster.address import address_fault, split_address
from kerasdist.errors import AuthenticationError, ClusterError, ProtocolError
from kerasdist.transport.base import Connection
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.framing import FrameType
from kerasdist.transport.log import LOGGER
from kerasdist.transport.rendezvous.dial import dial_tcp
from kerasdist.transport.rendezvous.listener import Listener
from kerasdist.transport.rendezvous.waiting_notice import (
    Absent,
    Sight,
    WaitingNotice,
)

_SESSION, _PURPOSE = "kerasdist run", "node"
# Seconds between two attempts.
AGAIN_SECONDS = 0.5
_REPLY_SECONDS = 10.0


class RendezvousError(Exception):
    """The launchers can't begin a job together."""


@dataclass(frozen=True, kw_only=True)
class LocalPart:
    """The part of a job's tasks that runs on this host.

    Attributes:
        cluster: The addresses of all tasks, as `TF_CONFIG` has them.
        first: The index of this host's first task, by kind.
        bound: Sockets that keep the ports of this host's tasks, by kind.
        facts: The versions of each host that is here, by its number; empty if there
            will be a job.
        refused: Why launchers were refused, as host 0 knows it.
    """

    cluster: dict[str, list[str]]
    first: dict[str, int]
    bound: dict[str, list[socket.socket]]
    facts: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    refused: Sequence[str] = ()


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
            part = _meet(options, workers, servers, secret, undo)
        except (OSError, ClusterError) as error:
            hint = ""
            if errno.EADDRINUSE in (getattr(error, "errno", 0), _errno_behind(error)):
                hint = (
                    ". If another launcher of this job runs on this machine, give each "
                    "its --node-rank"
                )
            raise RendezvousError(
                f"the rendezvous at {options.rendezvous} isn't possible: {error}{hint}"
            ) from error
        yield part


def _errno_behind(error: BaseException) -> int | None:
    return getattr(error.__cause__, "errno", None)


def _meet(
    options: NodeOptions,
    workers: int,
    servers: int,
    secret: bytes,
    undo: contextlib.ExitStack,
) -> LocalPart:
    host, port = split_address(options.rendezvous)
    here = options.rank == 0 or (options.rank is None and is_here(Host(name=host)))
    own = host if here else _own_address(host, port)
    bound: dict[str, list[socket.socket]] = {}
    for kind, count in (("worker", workers), ("ps", servers)):
        bound[kind] = [undo.enter_context(_bound(own)) for _ in range(count)]
    named = Host(name=own).in_address
    mine = {
        kind: [f"{named}:{sock.getsockname()[1]}" for sock in some]
        for kind, some in bound.items()
    }
    for sock in bound["worker"] if options.only_looks else ():
        sock.listen()  # before the others know of it, and look
    facts = None
    if options.only_looks:
        facts = probe.facts(os.getcwd(), [])
        # Each launcher runs its own part of the job, in a folder of its own.
        del facts["working folder"]
    exchange = _collect if here else _ask
    found = exchange(options, {"tasks": mine, "facts": facts}, secret)
    return LocalPart(
        cluster=found["cluster"],
        first=found["first"],
        bound=bound,
        facts={int(rank): each for rank, each in found.get("facts", {}).items()},
        refused=found.get("refused", ()),
    )


def _own_address(host: str, port: int) -> str:
    """Return this host's address, as the rendezvous's host reaches it."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[
        0
    ]
    with socket.socket(family, kind) as sock:
        sock.connect(target)  # sends nothing
        return str(sock.getsockname()[0])


def _bound(host: str) -> socket.socket:
    """Return a socket that is bound to a free port, and doesn't listen."""
    family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[
        0
    ]
    sock = socket.socket(family, kind)
    try:
        sock.bind(address)
        # Not before: ports would be shared.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def _collect(
    options: NodeOptions, mine: dict[str, Any], secret: bytes
) -> dict[str, Any]:
    """Wait for the others at the rendezvous, and send them the list."""
    waiting = _LauncherWait(options)
    named: dict[int, tuple[Connection, dict[str, Any]]] = {}
    unnamed: list[tuple[Connection, dict[str, Any]]] = []
    refused: list[str] = []

    def look() -> Sight:
        here = [f"host {rank} ({_where(each)})" for rank, each in named.copy().items()]
        here += [f"a host ({_where(each)})" for each in unnamed.copy()]
        number = options.count - 1 - len(here)
        missing = [Absent(f"{number} of {options.count} hosts", "")] if number else []
        last = listener.refusals()[-1:]
        return Sight(missing, ", ".join(["host 0", *here]), "".join(last))

    def drop_those_that_left() -> None:
        # One that was killed while it waited may come again, to its place.
        for rank in [r for r, (each, _) in named.items() if _has_left(each)]:
            del named[rank]
        unnamed[:] = [each for each in unnamed if not _has_left(each[0])]

    with contextlib.ExitStack() as undo:
        listener = Listener.acquire(options.rendezvous, secret, float(options.seconds))
        undo.callback(listener.release)
        listener.enter(_SESSION)
        undo.enter_context(waiting.notice("host 0", look, goal=options.rendezvous))
        while True:
            drop_those_that_left()
            if len(named) + len(unnamed) == options.count - 1:
                break
            if options.only_looks and not waiting.rest:
                break
            waiting.check(
                f"{len(named) + len(unnamed) + 1} of {options.count} hosts are here"
            )
            arrived = listener.pending.take_any(_SESSION, _PURPOSE, AGAIN_SECONDS)
            # One that arrives may have been killed, and started again, in that time.
            drop_those_that_left()
            for rank, connection, hello in arrived:
                undo.callback(connection.close)
                here = [mine, *(each[1] for each in (*named.values(), *unnamed))]
                lists = [each for some in here for each in some["tasks"].values()]
                fault = _fault(options, rank, hello, named, lists)
                if fault:
                    refused.append(fault)
                    if not options.only_looks:
                        print_line(f"a host was refused: {fault}", logging.WARNING)
                    _reply(connection, {"fault": fault})
                elif rank < 0:
                    unnamed.append((connection, hello))
                else:
                    named[rank] = connection, hello
        free = (i for i in range(1, options.count) if i not in named)
        named.update(zip(free, unnamed, strict=not options.only_looks))
        hellos = {0: mine, **{rank: named[rank][1] for rank in sorted(named)}}
        parts = [hello["tasks"] for hello in hellos.values()]
        cluster = {
            kind: [address for part in parts for address in part[kind]]
            for kind in ("worker", "ps")
        }
        if not cluster["ps"]:
            del cluster["ps"]
        found: dict[str, Any] = {"cluster": cluster, "first": _counts([])}
        if options.only_looks:
            found["facts"] = {rank: hello["facts"] for rank, hello in hellos.items()}
            found["refused"] = [*listener.refusals(), *refused]
        for index, rank in enumerate(sorted(named), 1):
            _reply(named[rank][0], {**found, "first": _counts(parts[:index])})
        return found


def _has_left(connection: Connection) -> bool:
    """Return whether a launcher has gone, which sends nothing while it waits."""
    try:
        return bool(select.select([connection.sock], [], [], 0)[0])
    except (OSError, ValueError):
        return True


def _where(host: tuple[Connection, dict[str, Any]]) -> str:
    """Return the address of a host that has connected."""
    addresses = [text for some in host[1]["tasks"].values() for text in some]
    return split_address(addresses[0])[0] if addresses else "without tasks"


def _counts(parts: Sequence[dict[str, list[str]]]) -> dict[str, int]:
    return {kind: sum(len(part[kind]) for part in parts) for kind in ("worker", "ps")}


def _fault(
    options: NodeOptions,
    rank: int,
    hello: dict[str, Any],
    ranks: Container[int],
    named: Sequence[list[str]],
) -> str:
    """Return why a launcher can't take part; empty if it can.

    Args:
        options: Those of this launcher.
        rank: The other's, negative if it hasn't any.
        hello: What the other has sent.
        ranks: Those that have arrived.
        named: The addresses of the tasks of all that are here.
    """
    if hello.get("count") != options.count:
        return (
            f"it was started with --nnodes {hello.get('count')}, and the host of the "
            f"rendezvous with --nnodes {options.count}"
        )
    facts = hello.get("facts")
    if (facts is not None) != options.only_looks:
        return (
            "one of `kerasdist run` and `kerasdist doctor` was started on it, and the "
            "other on the host of the rendezvous"
        )
    if rank == 0 or rank >= options.count or rank in ranks:
        return f"there is a host with --node-rank {rank} already"
    tasks = hello.get("tasks")
    if not isinstance(tasks, dict) or not all(
        isinstance(tasks.get(kind), list) for kind in ("worker", "ps")
    ):
        return "it names no tasks"
    if facts is not None and not (
        isinstance(facts, dict)
        and all(isinstance(v, str) and v.isprintable() for v in facts.values())
    ):
        return "it names no versions"
    # They go into every task's TF_CONFIG, and into messages.
    addresses = [*tasks["worker"], *tasks["ps"]]
    for address in addresses:
        fault = address_fault(address)
        if fault is not None:
            return f"an address of a task {fault} (received: {address!r})"
    others = [text for each in named for text in each]
    if len({*addresses, *others}) < len(addresses) + len(others):
        return "it names an address that another task has"
    return ""


def _reply(connection: Connection, value: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.write_json(FrameType.ROSTER, value, Deadline(_REPLY_SECONDS))


def _ask(options: NodeOptions, mine: dict[str, Any], secret: bytes) -> dict[str, Any]:
    """Connect to the rendezvous, and wait for the list."""
    waiting = _LauncherWait(options)
    hello = {
        "session": _SESSION,
        "purpose": _PURPOSE,
        "rank": -1 if options.rank is None else options.rank,
        "count": options.count,
        **mine,
    }
    connected = threading.Event()
    me = "this host" if options.rank is None else f"host {options.rank}"

    def look() -> Sight:
        if connected.is_set():
            others = Absent("other hosts", "", "host 0 waits for them, see its output")
            return Sight([others], "host 0")
        return Sight([Absent("host 0", options.rendezvous)])

    with waiting.notice(me, look):
        while True:
            try:
                connection = dial_tcp(
                    options.rendezvous, secret, hello, Deadline(waiting.rest)
                )
                with connection:
                    connected.set()
                    return _await_list(connection, waiting)
            except (AuthenticationError, ProtocolError) as error:
                raise RendezvousError(
                    f"the process at {options.rendezvous} isn't the launcher of this "
                    f"job: {error}"
                ) from error
            except (OSError, EOFError) as error:
                reason = str(error) or type(error).__name__
            connected.clear()
            waiting.check(f"host 0 isn't at {options.rendezvous} yet ({reason})")
            time.sleep(AGAIN_SECONDS)


def _await_list(connection: Connection, waiting: _LauncherWait) -> dict[str, Any]:
    try:
        _, value = connection.read_json(Deadline(waiting.for_list()))
    except TimeoutError as error:
        raise waiting.error("other hosts aren't here") from error
    if "fault" in value:
        raise RendezvousError(f"host 0 has refused this one: {value['fault']}")
    return value


class _LauncherWait:
    """The time that a launcher waits."""

    def __init__(self, options: NodeOptions) -> None:
        self._options = options
        self._deadline = Deadline(float(options.seconds))

    @property
    def rest(self) -> float:
        """Seconds that are left."""
        return self._deadline.remaining()

    def for_list(self) -> float:
        """Return for how many seconds host 0, which was there, may wait for others."""
        if self._options.only_looks:
            # It goes on without them at the end of its own time, which began earlier
            # than the connection.
            return self._options.seconds + _REPLY_SECONDS
        return self.rest

    def notice(
        self, me: str, look: Callable[[], Sight], goal: str = ""
    ) -> WaitingNotice:
        """Return what logs from time to time that this launcher waits."""
        return WaitingNotice(
            me,
            look,
            self._deadline,
            goal=goal,
            option="--start-timeout",
            hint=f"Start the same command on all {self._options.count} hosts.",
            logger=LOGGER if self._options.only_looks else LOGGER.getChild("run"),
        )

    def check(self, what: str) -> None:
        """Raise an error that tells what is the case, when the time is over."""
        if not self.rest:
            raise self.error(what)

    def error(self, what: str) -> RendezvousError:
        """Return the error at the end of the time."""
        return RendezvousError(
            f"{what}, after {self._options.seconds} s (--start-timeout). Start the "
            f"same command on all {self._options.count} hosts"
        )
