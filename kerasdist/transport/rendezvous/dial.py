"""Connecting to a worker that may not have started yet."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kerasdist import errors
from kerasdist.transport import handshake
from kerasdist.transport.base import Aborted, Connection
from kerasdist.transport.deadline import Cancellation, Deadline
from kerasdist.transport.framing import (
    FrameType,
    read_record,
    to_object,
    unexpected,
)
from kerasdist.transport.handshake import is_loopback, why_not_same_user
from kerasdist.transport.rendezvous.waiting_notice import (
    Absent,
    Sight,
    WaitingNotice,
    connect,
    connect_socket,
    why_unreachable,
)
from kerasdist.transport.tls import Credentials, binding_of, connect_tls, wrap

_Result = TypeVar("_Result")

# Seconds for finding out why a task can't be reached.
PROBE_SECONDS = 2.0
_CONNECT_SECONDS = 10.0
# Longer than a worker takes from the moment its launcher listens for it until it
# accepts; after that the attempt has failed, and another one may succeed.
_HANDSHAKE_SECONDS = 60.0
# For a refusal, which the system takes at once.
_ANSWER_SECONDS = 1.0
# A roster of a large job fills the system's buffers.
_ROSTER_SECONDS = 8.0


def dial_address(
    address: str,
    secret: bytes,
    hello: dict[str, Any],
    deadline: Deadline,
    stop: Cancellation | None = None,
    *,
    unix_name: str | None = None,
) -> Connection:
    """Connect to the process at `address`, prove the secret, send a hello.

    Args:
        address: As the cluster's settings have it; the process there must have the
            same one.
        secret: The job's secret.
        hello: See `handshake.authenticate_as_client`.
        deadline: When to give up.
        stop: When this is set, by any thread, the call ends with an error at once.
        unix_name: The name of the Unix socket at which the process listens, too, if
            it's on this host; None: by TCP.

    Raises:
        OSError, EOFError: It can't be reached now.
        AuthenticationError, ProtocolError: See `handshake.authenticate_as_client` and
            `tls.connect_tls`.
        ClusterError: This task's certificates can't be used any more.
    """
    stop = stop or Cancellation()
    limit = Deadline(min(deadline.remaining(), _CONNECT_SECONDS))
    if unix_name is None:
        credentials = Credentials.read(os.environ)
        sock = wrap(connect(address, limit, stop), credentials, server=False)
    else:
        sock = connect_socket(socket.AF_UNIX, unix_name, limit.remaining(), stop)
    limit = Deadline(min(deadline.remaining(), _HANDSHAKE_SECONDS))
    try:
        with stop.bound(sock):
            connect_tls(sock, limit, address)
            auth = handshake.authenticate_as_client(
                *(sock, secret, hello, limit, address), binding=binding_of(sock)
            )
            if not secret and is_loopback(address):
                _check_user(sock, address)
    except BaseException:
        sock.close()
        raise
    return Connection(sock, auth)


def _check_user(sock: socket.socket, address: str) -> None:
    """Check that a process belongs to this user, if there is no secret to prove."""
    why_not = why_not_same_user(sock)
    if why_not is not None:
        raise errors.AuthenticationError(
            f"The process at {address} can't be taken for one of this job: {why_not}. "
            "Without KERASDIST_SECRET only processes of one user can form a job: set "
            "it to the same value on all workers, or choose another port."
        )


# The answer to a hello: a roster, whose type depends on the purpose, or a refusal.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """The refusal of a hello.

    Attributes:
        message: The reason.
        missing: The workers because of which it is refused, with the reasons.
        final: Whether it will be refused later, too.
    """

    message: str
    missing: Mapping[int, str] = dataclasses.field(default_factory=dict)
    final: bool = True


class Refused(Exception):
    """The other side has refused a hello."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal

    def to_startup_error(self) -> errors.StartupError:
        """Return the error that a script gets."""
        return errors.StartupError(self.refusal.message, dict(self.refusal.missing))


def hello_of(session: str, purpose: str, rank: int, record: Any) -> dict[str, Any]:
    """Return a dataclass as a hello, with what the listener assigns it by."""
    known = {"session": session, "purpose": purpose, "rank": rank}
    return known | to_object(record)


def refuse(
    connection: Connection,
    message: str,
    missing: Mapping[int, str] | None = None,
    *,
    final: bool = True,
) -> None:
    """Refuse a hello, and close its connection; see `Refusal`."""
    refusal = Refusal(message=message, missing=missing or {}, final=final)
    answer(connection, refusal, FrameType.REFUSAL)
    connection.close()


def answer(
    connection: Connection, record: Any, kind: FrameType = FrameType.ROSTER
) -> None:
    """Answer a hello with a dataclass; a side that has ended since needs none."""
    is_roster = kind is FrameType.ROSTER
    deadline = Deadline(_ROSTER_SECONDS if is_roster else _ANSWER_SECONDS)
    with contextlib.suppress(OSError):
        connection.write_json(kind, to_object(record), deadline)


class Unanswered(TimeoutError):
    """The other side is there, and hasn't answered a hello in time."""


def register(
    address: str,
    secret: bytes,
    hello: dict[str, Any],
    kind: type[_Result],
    deadline: Deadline,
    stop: Cancellation,
    grace: float = 0.0,
    connected: threading.Event | None = None,
) -> tuple[Connection, _Result]:
    """Connect as `dial_address`, and wait for the answer to the hello.

    Args:
        address: See `dial_address`.
        secret: See `dial_address`.
        hello: See `dial_address`.
        kind: The type of the answer.
        deadline: When to give up.
        stop: See `dial_address`.
        grace: Seconds that the answer may take longer.
        connected: Set while it waits for the answer.

    Returns:
        The connection, the caller's, and the answer.

    Raises:
        Refused: The other side has refused the hello.
        Unanswered: It is there, and hasn't answered until then.
        As `dial_address`.
    """
    connected = connected or threading.Event()
    connection = dial_address(address, secret, hello, deadline, stop)
    connected.set()
    try:
        with stop.bound(connection.sock):
            frame, value = connection.read_json(Deadline(deadline.remaining() + grace))
        if frame is FrameType.REFUSAL:
            raise Refused(read_record(value, Refusal, "A refusal"))
        if frame is not FrameType.ROSTER:
            raise unexpected(frame)
        return connection, read_record(value, kind, "A roster")
    except BaseException as error:
        connected.clear()
        connection.close()
        if isinstance(error, TimeoutError):
            raise Unanswered(*error.args) from error
        raise


def retry(
    attempt: Callable[[], _Result],
    deadline: Deadline,
    index: int,
    address: str,
    stop: threading.Event,
    who: str = "Rank",
    connected: threading.Event | None = None,
) -> _Result:
    """Try until it works or the deadline passes: machines start minutes apart.

    Args:
        attempt: What to try; an OSError or EOFError means "not yet".
        deadline: When to give up.
        index: The peer's index, for messages: its rank, or a server's index.
        address: The peer's address.
        stop: When this is set, give up.
        who: The kind of peer, for messages: "Rank" or "Server".
        connected: Set while the attempt waits for the peer's answer, which needs the
            other workers, see `register`. Without it an attempt ends when it has
            connected.

    Raises:
        StartupError: It didn't work by the deadline; `missing` has the index.
        ProtocolError: The process at the address isn't this version of kerasdist.
        Aborted: `stop` was set.
    """
    number = 0
    peer = f"{who.lower()} {index}"

    def look() -> Sight:
        if connected is None or not connected.is_set():
            return Sight([Absent(peer, address)])
        why = f"{peer} waits for them, see its output"
        return Sight([Absent("other workers", "", why)], here=peer)

    with contextlib.ExitStack() as undo:
        # Most attempts succeed at once.
        notice = WaitingNotice("this task", look, deadline)
        if connected is not None:
            undo.enter_context(notice)
        while not stop.is_set():
            try:
                return attempt()
            except errors.ProtocolError as error:
                raise errors.ProtocolError(
                    f"{who} {index} isn't the process at its address {address}. {error}"
                ) from error
            except (OSError, EOFError) as error:
                if isinstance(error, errors.KerasDistError):
                    raise
                if deadline.expired:
                    why = why_unreachable(address, PROBE_SECONDS) or str(error)
                    raise errors.StartupError(
                        f"{who} {index} ({address}) couldn't be reached within "
                        f"{deadline.seconds:g} s: {why}. Is it running (look at its "
                        "output first), and is its address right? `kerasdist doctor` "
                        "shows which tasks can be reached from here.",
                        {index: why},
                    ) from error
            if not number and connected is None:
                undo.enter_context(notice)
            stop.wait(min(0.05 * 1.5 ** min(number, 8), deadline.remaining()))
            number += 1
    raise Aborted
