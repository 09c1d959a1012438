"""How the workers of a session come together.

C: rank 0, the chief      W: every other rank

1. W -> C   connect to the chief's address, handshake, hello with who I am
            (`Member`), what I was asked for (`settings`) and how long I wait;
            again and again until the deadline
2. C        waits for all ranks, no longer than any of them; checks that all
            were asked for the same
3. C -> W   ROSTER: every rank's member record     -> the session is open
       or   REFUSAL: why it isn't, with the reasons for each missing rank
"""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kerasdist import errors
from kerasdist.transport.connection import Connection
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.rendezvous.dial import PROBE_SECONDS, dial_tcp, retry
from kerasdist.transport.rendezvous.listener import Listener
from kerasdist.transport.rendezvous.member import Member
from kerasdist.transport.rendezvous.probe import why_unreachable
from kerasdist.transport.rendezvous.waiting_notice import WaitingNotice
from kerasdist.transport.wire.framing import FrameType, unexpected

__all__ = ["Arrival", "gather", "report"]

# How much longer than the chief the others wait, to get the chief's reasons.
_GRACE_SECONDS = 8.0
_MOST_PROBES = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """What a worker comes to the start with.

    Attributes:
        session: Which session it wants to be part of.
        me: Who it is.
        settings: What it was asked for; JSON values.
        addresses: All workers' addresses, by rank.
        secret: The job's secret.
    """

    session: str
    me: Member
    settings: dict[str, Any]
    addresses: tuple[str, ...]
    secret: bytes


def report(
    arrival: Arrival, deadline: Deadline
) -> tuple[tuple[Member, ...], dict[int, Connection]]:
    """Steps 1 and 3 of a worker that isn't the chief.

    Returns:
        All workers by rank, and the connection to the chief, now the caller's.

    Raises:
        StartupError, AuthenticationError, ProtocolError: See `Session`.
    """
    chief = arrival.addresses[0]

    def come() -> tuple[tuple[Member, ...], dict[int, Connection]]:
        hello = {
            "session": arrival.session,
            "purpose": "control",
            "rank": arrival.me.rank,
            "member": dataclasses.asdict(arrival.me),
            "settings": arrival.settings,
            "seconds": deadline.remaining(),
        }
        connection = dial_tcp(chief, arrival.secret, hello, deadline)
        try:
            patience = Deadline(deadline.remaining() + _GRACE_SECONDS)
            kind, answer = connection.read_json(patience)
            if kind is FrameType.REFUSAL:
                raise _refused(answer)
            records = answer.get("members")
            if kind is not FrameType.ROSTER or not isinstance(records, list):
                raise unexpected(kind)
            members = tuple(Member.from_json(record) for record in records)
            if [m.rank for m in members] != list(range(len(arrival.addresses))):
                raise errors.ProtocolError("The roster doesn't hold all ranks.")
            if any(m.address != arrival.addresses[m.rank] for m in members):
                raise errors.ProtocolError("The roster holds other addresses.")
        except BaseException:
            connection.close()
            raise
        return members, {0: connection}

    come_in = retry(come, deadline, 0, chief, threading.Event())
    if come_in is None:  # only a `stop` that is set makes it so
        raise RuntimeError("unreachable")
    return come_in


def _refused(answer: dict[str, Any]) -> errors.StartupError:
    missing = answer.get("missing")
    reasons = {
        int(rank): str(why)
        for rank, why in (missing.items() if isinstance(missing, dict) else ())
        if rank.isdecimal() and len(rank) < 10
    }
    return errors.StartupError(str(answer.get("message")), reasons)


@dataclasses.dataclass
class _PendingPeer:
    """A worker that has come to the chief and waits for the others."""

    connection: Connection
    member: Member
    settings: object
    patience: Deadline


def gather(
    arrival: Arrival, deadline: Deadline, listener: Listener
) -> tuple[tuple[Member, ...], dict[int, Connection]]:
    """Steps 2 and 3: the chief.

    Returns:
        All workers by rank, and the connection to each of them but this one, now
        the caller's.

    Raises:
        StartupError: See `Session`. All who came have been told.
    """
    guests: dict[int, _PendingPeer] = {}
    try:
        _wait_for_all(arrival, deadline, listener, guests)
        _check_settings(arrival, guests)
    except errors.StartupError as error:
        for guest in guests.values():
            _refuse(guest.connection, str(error), error.missing)
        raise
    except BaseException:
        for guest in guests.values():
            guest.connection.close()
        raise
    roster = [arrival.me, *(guests[rank].member for rank in sorted(guests))]
    answer = {"members": [dataclasses.asdict(member) for member in roster]}
    for guest in guests.values():
        try:
            deadline = Deadline(_GRACE_SECONDS)
            guest.connection.write_json(FrameType.ROSTER, answer, deadline)
        except OSError:  # it has died since: the supervisor finds that out
            continue
    return tuple(roster), {rank: guest.connection for rank, guest in guests.items()}


def _wait_for_all(
    arrival: Arrival,
    deadline: Deadline,
    listener: Listener,
    guests: dict[int, _PendingPeer],
) -> None:
    size = len(arrival.addresses)
    notice = WaitingNotice("rank 0")
    while True:
        for rank, guest in list(guests.items()):
            if guest.connection.ended:
                guests.pop(rank).connection.close()
        if len(guests) == size - 1:
            return
        # Whoever waits shortest gets the reasons too.
        first = min([deadline, *(g.patience for g in guests.values())], key=_left)
        if first.expired:
            raise _missing(arrival, first, listener, guests)
        notice.say(
            [
                f"rank {rank} ({arrival.addresses[rank]})"
                for rank in range(1, size)
                if rank not in guests
            ],
            first,
        )
        seconds = min(first.remaining(), 0.5)
        came = listener.take_any(arrival.session, "control", seconds)
        for rank, connection, hello in came:
            try:
                guest = _receive(rank, connection, hello, arrival.addresses)
            except errors.ProtocolError as error:
                _refuse(connection, str(error), {})
                continue
            older = guests.pop(rank, None)
            guests[rank] = guest
            if older is not None and not older.connection.ended:
                _refuse(older.connection, _twice(older.member, guest.member), {})
            elif older is not None:
                older.connection.close()


def _left(deadline: Deadline) -> float:
    return deadline.remaining()


def _receive(
    rank: int,
    connection: Connection,
    hello: dict[str, Any],
    addresses: tuple[str, ...],
) -> _PendingPeer:
    member = Member.from_json(hello.get("member"))
    seconds = hello.get("seconds")
    if not 0 < rank < len(addresses) or member.rank != rank:
        raise errors.ProtocolError(f"There is no such rank. Received: rank={rank}.")
    if member.address != addresses[rank]:
        raise errors.ProtocolError(
            f"Rank {rank} has another address. Received: {member.address!r}, expected "
            f"{addresses[rank]!r}."
        )
    if not isinstance(seconds, (int, float)) or not 0 <= seconds <= 1e9:
        raise errors.ProtocolError(f"A hello is damaged. Received: {seconds=!r}.")
    return _PendingPeer(connection, member, hello.get("settings"), Deadline(seconds))


def _twice(older: Member, newer: Member) -> str:
    return (
        f"Two processes came as rank {older.rank}. Received: process {older.pid} "
        f"(this one) and process {newer.pid}, which came later and takes part. Each "
        "worker needs a task index of its own: look at TF_CONFIG (or what sets it) "
        "where both run, and end the one that is too many."
    )


def _check_settings(arrival: Arrival, guests: dict[int, _PendingPeer]) -> None:
    differing = {
        rank: guest.settings
        for rank, guest in sorted(guests.items())
        if guest.settings != arrival.settings
    }
    if not differing:
        return
    shown = "".join(f"\n  rank {rank}: {theirs}" for rank, theirs in differing.items())
    raise errors.StartupError(
        f"Workers were asked for different things. Received:\n  rank 0: "
        f"{arrival.settings}{shown}\nAll workers must run the same script with the "
        "same arguments of the strategy.",
        dict.fromkeys(differing, "it was asked for something else"),
    )


def _missing(
    arrival: Arrival,
    deadline: Deadline,
    listener: Listener,
    guests: dict[int, _PendingPeer],
) -> errors.StartupError:
    """Say which ranks didn't come, and as far as can be seen from here, why."""
    addresses = arrival.addresses
    ranks = [rank for rank in range(1, len(addresses)) if rank not in guests]
    elsewhere = listener.others(arrival.session, "control")

    def reason(rank: int) -> str:
        if rank in elsewhere:
            return (
                "it came, but for another session than rank 0's: does it have the "
                "same list of workers, and create its strategies in the same order?"
            )
        return why_unreachable(addresses[rank], PROBE_SECONDS) or (
            "it listens there but hasn't come to rank 0; can it reach "
            f"{addresses[0]}, and does it hold the same KERASDIST_SECRET?"
        )

    with ThreadPoolExecutor(min(_MOST_PROBES, len(ranks)), "kerasdist-probe") as pool:
        missing = dict(zip(ranks, pool.map(reason, ranks), strict=True))
    lines = [
        f"\n  rank {rank} ({addresses[rank]}): {why}" for rank, why in missing.items()
    ]
    refused = listener.refusals()
    if refused:
        lines.append("\nConnections that were refused: " + "; ".join(refused))
    return errors.StartupError(
        f"{len(missing)} of {len(addresses)} workers didn't come within "
        f"{deadline.seconds:.3g} s:" + "".join(lines) + "\nStart the missing workers "
        "(look at their output first), run `kerasdist doctor` where they run, or "
        "give them more time with `startup_timeout=`.",
        missing,
    )


def _refuse(connection: Connection, message: str, missing: dict[int, str]) -> None:
    answer = {"message": message, "missing": missing}
    try:
        connection.write_json(FrameType.REFUSAL, answer, Deadline(1.0))
    except OSError:  # it has given up already
        pass
    finally:
        connection.close()
