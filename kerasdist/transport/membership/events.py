"""The calls of a membership machine: events that go in, and what is to be done.

The caller owns the connections, the timers and the collectives. It handles one event at
a time, and carries out the outputs, in their order, before it uses a result.
"""

from __future__ import annotations

from dataclasses import dataclass

from kerasdist.transport.membership.epochs import (
    Decision,
    Member,
    Progress,
    StopReason,
)
from kerasdist.transport.membership.messages import Message

__all__ = [
    "Apply",
    "Dead",
    "Event",
    "Fetched",
    "Finished",
    "GiveUp",
    "Install",
    "Leave",
    "Output",
    "Received",
    "Send",
    "Silent",
    "Stop",
    "Suspend",
    "Timeout",
    "TooLate",
]


# Events.


@dataclass(frozen=True, slots=True)
class Received:
    """A message came from `sender`."""

    sender: Member
    message: Message


@dataclass(frozen=True, slots=True)
class Dead:
    """The process of `member` is proven dead: its host refuses a connection to it."""

    member: Member


@dataclass(frozen=True, slots=True)
class Silent:
    """`member` is out of contact; whether it lives is unknown."""

    member: Member


@dataclass(frozen=True, slots=True)
class Finished:
    """This worker wants to use the result of a collective in which all take part."""

    progress: Progress


@dataclass(frozen=True, slots=True)
class Fetched:
    """This worker has got what it lacked from another one."""

    progress: Progress


@dataclass(frozen=True, slots=True)
class Apply:
    """This worker wants to join: send the request to `members`, now and then again."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """This worker wants to leave after its step."""


@dataclass(frozen=True, slots=True)
class Timeout:
    """Time for another attempt."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Training was suspended for too long."""


Event = Received | Dead | Silent | Finished | Fetched | Apply | Leave | Timeout | GiveUp


# Outputs.


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to `to`; it may get lost, late, or there twice."""

    to: Member
    message: Message


@dataclass(frozen=True, slots=True)
class Suspend:
    """End the collective that is running; begin none until `Install`."""


@dataclass(frozen=True, slots=True)
class TooLate:
    """Discard the result which `Finished` or `Fetched` was about."""


@dataclass(frozen=True, slots=True)
class Install:
    """Train in this epoch."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class Stop:
    """Take no further part, and don't call the machine again.

    Attributes:
        reason: If it is EXCLUDED, the process may join as its next incarnation.
        missing: Members that are out of contact, and not proven dead.
    """

    reason: StopReason
    missing: tuple[Member, ...] = ()


Output = Send | Suspend | TooLate | Install | Stop
