"""Log lines about tasks that a start-up is still waiting for.

Other tasks may be started by hand, or be queued by a cluster: without a line in the log
a job that waits looks like one that hangs. So there is one every ten seconds, which
names those that are here, those that aren't, and why not as far as it is known; on a
terminal it is rewritten in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from kerasdist.cluster.address import address_fault, split_address
from kerasdist.transport.deadline import Cancellation, Deadline, daemon, in_daemon
from kerasdist.transport.log import LOGGER, log_in_background, rewrites_lines
from kerasdist.transport.memory import close_in_children

# Connections to a peer's address, and in words why it can't be reached.

_REASONS = {
    errno.ECONNREFUSED: "connection refused: nothing listens there",
    errno.EHOSTUNREACH: "no route to host: it is down, or a firewall rejects us",
    errno.ENETUNREACH: "its network can't be reached from here",
    errno.ECONNRESET: "the connection was reset by the other side",
    errno.EACCES: "a firewall on this machine forbids it",
    errno.EPERM: "a firewall on this machine forbids it",
    errno.EADDRNOTAVAIL: "this machine has no address from which it could connect",
}
_Target = tuple[str, int] | tuple[str, int, int, int]
_Found = list[tuple[socket.AddressFamily, _Target]]


def why_unreachable(address: str, timeout: float) -> str | None:
    """Try to open a TCP connection, and describe why it fails.

    The connection is closed at once: the listener gets one without data. An open
    connection doesn't prove that a worker is there: transparent proxies, such as the
    sidecars of a service mesh, accept any connection.

    Args:
        address: `"host:port"`, or `"[v6]:port"`.
        timeout: Seconds for the whole of it: looking up the name, and all the
            addresses that it has.

    Returns:
        None if a connection could be opened, else the reason in words, without a
        full stop.
    """
    fault = address_fault(address)
    if fault is not None:
        return f"its address {fault}"
    try:
        connect(address, Deadline(timeout), Cancellation()).close()
    except OSError as error:
        return str(error)
    return None


def connect(address: str, deadline: Deadline, stop: Cancellation) -> socket.socket:
    """Open a TCP connection to the first address of a host that accepts.

    Args:
        address: `"host:port"`, or `"[v6]:port"`.
        deadline: When to give up.
        stop: When another thread sets it, the call ends with an error at once.

    Raises:
        OSError: No address accepts; of the class of the last one's error, with all
            reasons in words, without a full stop.
    """
    found = look_up(*split_address(address), deadline)
    if isinstance(found, str):
        raise OSError(found)
    reasons: list[str] = []
    failure = OSError()
    for i, (family, target) in enumerate(found):
        # Each address gets its share of what is left: a silent first one mustn't
        # hide a second one that accepts.
        share = deadline.remaining() / (len(found) - i)
        try:
            return connect_socket(family, target, share, stop)
        except OSError as error:
            reasons.append(_in_words(error, deadline.seconds))
            failure = type(error)("; ".join(dict.fromkeys(reasons)))
    raise failure


def connect_socket(
    family: socket.AddressFamily, target: Any, seconds: float, stop: Cancellation
) -> socket.socket:
    """Return a socket that is connected to one address.

    Raises:
        OSError: It couldn't be connected in this time.
    """
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        close_in_children(sock)
        # 0 would mean "don't wait at all" and end in a meaningless error.
        sock.settimeout(max(seconds, 0.001))
        with stop.bound(sock):
            sock.connect(target)
        # On one machine the kernel may choose the very port that is dialed as the
        # source of the connection: then this process is connected to itself.
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, "")
        undo.pop_all()
    return sock


def _in_words(error: OSError, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {seconds:.3g} s"
    number = error.errno or 0
    return _REASONS.get(number, os.strerror(number) if number else str(error))


def look_up(host: str, port: int, deadline: Deadline) -> _Found | str:
    """Resolve a name, or describe why that fails, without a full stop.

    `getaddrinfo` can't be interrupted and may take minutes, so it runs in a thread
    that is abandoned when the time is over (as a daemon it doesn't delay the exit).

    Returns:
        Families and socket addresses, at least one, in the system's order; or the
        reason in words.
    """
    with contextlib.suppress(OSError, ValueError):
        # Most are numbers, which need no name server.
        ipaddress.ip_address(host.partition("%")[0])
        return _resolve(host, port, socket.AI_NUMERICHOST)
    found = in_daemon("kerasdist-look-up", _resolve, host, port, 0)
    wait([found], deadline.remaining())
    if not found.done():
        return f"looking up its host name took longer than {deadline.seconds:g} s"
    try:
        return found.result() or "its host name has no address"
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:
            return (
                "its host name doesn't resolve: the name server can't be reached or "
                "has no entry yet"
            )
        return f"its host name doesn't resolve ({error.strerror})"
    except (OSError, UnicodeError) as error:
        return f"its host name doesn't resolve ({error})"


def _resolve(host: str, port: int, flags: int) -> _Found:
    found: _Found = []
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    for family, _, _, _, target in infos:
        item = (family, target)
        if item not in found:
            found.append(item)  # type: ignore[arg-type]
    return found


FIRST_SECONDS = 10.0
AGAIN_SECONDS = 10.0
REWRITE_SECONDS = 1.0
_PROBE_SECONDS = 2.0
_MOST_PROBES = 16
# Tasks, and reasons, that a line has; the others are counted.
_MOST_NAMES = 4


@dataclasses.dataclass(frozen=True)
class Absent:
    """A task that is missing.

    Attributes:
        name: For instance "rank 2".
        address: Its address.
        why: The reason, if it is known without a look at its address.
    """

    name: str
    address: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.address})" if self.address else self.name


@dataclasses.dataclass(frozen=True)
class Sight:
    """The tasks at one moment.

    Attributes:
        missing: Those that are waited for.
        here: The names of those that are there, in words; empty: nothing is known.
        refused: The last connection that was refused, with the reason.
    """

    missing: Sequence[Absent]
    here: str = ""
    refused: str = ""


class WaitingNotice:
    """Logs what is waited for inside the block, in a thread that delays nothing.

    Args:
        me: The name of this task, for instance "rank 0".
        look: Returns what there is now; is called from the other thread.
        deadline: Until when it is waited.
        goal: To what the missing ones should connect, for instance "rank 0 (a:1)".
        option: The option that sets the deadline.
        hint: What helps, in the first line.
        logger: The logger; its lines begin as those of the program that has it.
        environ: The environment; the process's by default.
    """

    def __init__(
        self,
        me: str,
        look: Callable[[], Sight],
        deadline: Deadline,
        *,
        goal: str = "",
        option: str = "`startup_timeout`",
        hint: str = "`kerasdist doctor` shows which tasks can be reached.",
        logger: logging.Logger = LOGGER,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        environ = os.environ if environ is None else environ
        self._me = me
        self._look = look
        self._deadline = deadline
        self._goal = goal
        self._option = option
        self._hint = hint
        self._logger = logger
        self._begin = "kerasdist:" if logger is LOGGER else "kerasdist run:"
        # Then a launcher listens at each address before it starts the task.
        self._launched = bool(environ.get("KERASDIST_LISTEN_FD"))
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._logged = False

    def __enter__(self) -> WaitingNotice:
        self._began = time.monotonic()
        # It isn't waited for: it may be looking at an address.
        daemon("kerasdist-waiting", self._run).start()
        return self

    def __exit__(self, kind: object, error: object, _: object) -> None:
        self._ended.set()
        with self._lock:
            if not self._logged:
                return
            seconds = time.monotonic() - self._began
            end = "waits no longer" if error is not None else "has all it waited for"
            text = f"{self._begin} {self._me} {end}, after {seconds:.0f} s."
            log_in_background(
                logging.INFO,
                "%s",
                text,
                logger=self._logger,
                progress=False,
                seconds=round(seconds, 1),
            )

    def _run(self) -> None:
        pause = FIRST_SECONDS
        while not self._ended.wait(pause):
            sight = self._look()
            if not sight.missing:
                pause = REWRITE_SECONDS
                continue
            reasons = self._reasons(sight.missing)
            in_place = rewrites_lines()
            pause = REWRITE_SECONDS if in_place else AGAIN_SECONDS
            # The reasons are looked for less often than the seconds are counted.
            for _ in range(round(AGAIN_SECONDS / pause) or 1):
                self._log(sight, reasons)
                if self._ended.wait(pause):
                    return
                if not in_place:
                    break
            pause = 0.0

    def _log(self, sight: Sight, reasons: Mapping[str, str]) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            seconds = time.monotonic() - self._began
            first, self._logged = not self._logged, True
            log_in_background(
                logging.WARNING,
                "%s",
                self._text(sight, reasons, seconds, first=first),
                logger=self._logger,
                progress=True,
                waiting_for=reasons,
                here=sight.here,
                seconds=round(seconds, 1),
            )

    def _text(
        self, sight: Sight, reasons: Mapping[str, str], seconds: float, *, first: bool
    ) -> str:
        names: dict[str, list[str]] = {}
        for name, why in reasons.items():
            names.setdefault(why, []).append(name)
        found = [f"{_some(whose)}: {why}" for why, whose in names.items() if why]
        parts = [
            f"{self._begin} {self._me} has been waiting for "
            f"{_some([str(each) for each in sight.missing])} for {seconds:.0f} s, and "
            f"continues for at most {self._deadline.remaining():.0f} s "
            f"({self._option})."
        ]
        if sight.here:
            parts.append(f"Here: {sight.here}.")
        if found:
            parts.append(f"Missing: {_some(found, '; ')}.")
        if sight.refused:
            parts.append(f"Last refused: {sight.refused.rstrip('.')}.")
        if first:
            parts.append(self._hint)
        return " ".join(parts)

    def _reasons(self, missing: Sequence[Absent]) -> dict[str, str]:
        """Return why tasks are missing, by their names; the first ones' only."""
        shown = missing[:_MOST_PROBES]
        with ThreadPoolExecutor(len(shown), "kerasdist-probe") as pool:
            whys = list(pool.map(self._why, shown))
        return {each.name: why for each, why in zip(shown, whys, strict=True)}

    def _why(self, task: Absent) -> str:
        if task.why or not task.address:
            return task.why
        why = why_unreachable(task.address, _PROBE_SECONDS)
        if self._launched and why is None:
            return "its process runs, but hasn't come to its strategy yet"
        if self._launched and why is not None and "nothing listens" in why:
            return "connection refused: its process has ended, or wasn't started"
        if why is None and self._goal:
            return (
                f"it listens there but hasn't connected to {self._goal}; can it reach "
                "that, and does it hold the same KERASDIST_SECRET?"
            )
        return why or "it listens there, but doesn't answer"


def _some(names: Sequence[str], separator: str = ", ") -> str:
    more = len(names) - _MOST_NAMES
    some = separator.join(names[:_MOST_NAMES])
    return f"{some} and {more} more" if more > 0 else some


def ranks_in_words(numbers: Sequence[int]) -> str:
    """Return ranks, in their order, in words: "ranks 0-3, 5"."""
    parts: list[tuple[int, int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1] = parts[-1][0], number
        else:
            parts.append((number, number))
    several = "s" if len(numbers) > 1 else ""
    text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
    return f"rank{several} {text}"
