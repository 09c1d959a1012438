"""Requests about epochs, from the workers of an elastic job to its servers.

    C: the first member of an epoch    W: another member    S: each server of the job

    1. C -> S     READY  a question: does S live? In the first epoch repeated until all
                         servers have answered
    2. C -> S     BEGIN  the epoch: its members, the servers that have answered 1., in
                         order, and the name of its session
    3. W -> S     ASK    a question for the servers and the session of 2., answered when
                         S has received that
    4. C, W -> S  connect to these servers, as in any job: `kerasdist.ps.server.server`

Each request is a connection of its own: its hello, and one answer. Requests of earlier
epochs than the present one of S are refused, unless that has failed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kerasdist import errors
from kerasdist.ps.settings import ServerSettings
from kerasdist.transport.cancellation import Cancellation
from kerasdist.transport.connection import Connection
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.rendezvous.dial import dial_tcp
from kerasdist.transport.wire.framing import FrameType, unexpected

PURPOSE = "epoch"
READY, BEGIN, ASK = "ready", "begin", "ask"
_ANSWER_SECONDS = 5.0


class Refused(Exception):
    """A server has refused a request.

    Args:
        message: The reason.
        final: Whether it will refuse it later, too.
    """

    def __init__(self, message: str, *, final: bool = True) -> None:
        super().__init__(message)
        self.final = final


@dataclasses.dataclass(frozen=True)
class Layout:
    """The servers of an epoch.

    Attributes:
        servers: Their indices among the job's servers, in the epoch's order.
        session: The name of the epoch's session.
    """

    servers: tuple[int, ...]
    session: str

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {"servers": list(self.servers), "session": self.session}

    @classmethod
    def from_json(cls, value: dict[str, Any], count: int) -> Layout:
        """Return the layout that `to_json` wrote.

        Args:
            value: The JSON object.
            count: The number of the job's servers.

        Raises:
            ProtocolError: It isn't one.
        """
        servers, session = value.get("servers"), value.get("session")
        if (
            not isinstance(session, str)
            or not isinstance(servers, list)
            or not 0 < len(servers) == len(set(map(str, servers)))
            or not all(type(each) is int and 0 <= each < count for each in servers)
        ):
            raise errors.ProtocolError(
                f"The servers of an epoch are damaged. Received: {value!r:.500}."
            )
        return cls(tuple(servers), session)


def agreed(settings: ServerSettings, min_workers: int) -> dict[str, Any]:
    """Return the settings that are the same on all tasks, as JSON values."""
    return {**settings.agreed(), "min_workers": min_workers}


def request(
    address: str,
    secret: bytes,
    hello: dict[str, Any],
    deadline: Deadline,
    stop: Cancellation | None = None,
) -> dict[str, Any]:
    """Send a server a request; return its answer.

    Args:
        address: The server's address.
        secret: The job's secret.
        hello: The request.
        deadline: When to give up.
        stop: When this is set, by any thread, the call ends with an error at once.

    Raises:
        Refused: The server has refused it.
        OSError, EOFError: The server can't be reached now, or hasn't answered.
        AuthenticationError, ProtocolError: See `dial_tcp`.
    """
    stop = stop or Cancellation()
    with (
        dial_tcp(address, secret, hello, deadline, stop) as connection,
        stop.bound(connection.sock),
    ):
        kind, value = connection.read_json(deadline)
    if kind is FrameType.REFUSAL:
        raise Refused(str(value.get("message")), final=value.get("final") is True)
    if kind is not FrameType.ROSTER:
        raise unexpected(kind)
    return value


def answer(connection: Connection, value: dict[str, Any]) -> None:
    """Answer a request, and close its connection."""
    _finish(connection, FrameType.ROSTER, value)


def refuse(connection: Connection, message: str, *, final: bool = True) -> None:
    """Refuse a request, and close its connection; see `Refused`."""
    _finish(connection, FrameType.REFUSAL, {"message": message, "final": final})


def _finish(connection: Connection, kind: FrameType, value: dict[str, Any]) -> None:
    with connection:
        try:
            connection.write_json(kind, value, Deadline(_ANSWER_SECONDS))
        except OSError:
            return  # the sender has ended, or waits no longer


def names(servers: Sequence[int], addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the names of servers in messages."""
    return tuple(f"server {index} ({addresses[index]})" for index in servers)
