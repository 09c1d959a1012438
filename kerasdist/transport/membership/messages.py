"""What goes into and out of a worker's membership machine.

Messages go to other machines. Those with an `epoch` concern the decision about its
successor. The words are those of Lamport, "Paxos Made Simple" (2001).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kerasdist.transport.membership.epochs import (
    Decision,
    Member,
    Progress,
    Report,
    StopReason,
)

__all__ = [
    "Accepted",
    "Apply",
    "Ballot",
    "Dead",
    "Decided",
    "Event",
    "Excluded",
    "Fetched",
    "Finished",
    "GiveUp",
    "Install",
    "Join",
    "Leave",
    "Leaving",
    "Loss",
    "Message",
    "Output",
    "Prepare",
    "Promise",
    "Propose",
    "Received",
    "Rejected",
    "Send",
    "Silent",
    "Stop",
    "Suspend",
    "Timeout",
    "TooLate",
]


class Ballot(NamedTuple):
    """The number of an attempt to decide; a member promises to ignore smaller ones."""

    round: int
    proposer: Member


# Messages.


@dataclass(frozen=True, slots=True)
class Join:
    """The sender wants to become a member. It proves its earlier incarnations dead."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """The sender wants to leave after a step."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Loss:
    """A member was lost: the receiver is to propose a next epoch.

    Attributes:
        dead: Processes that are proven dead.
        confirmed: Whether all members are known to be in this epoch.
    """

    epoch: int
    dead: frozenset[Member]
    confirmed: bool


@dataclass(frozen=True, slots=True)
class Prepare:
    """A request to suspend training and to promise a ballot.

    Attributes:
        base: The decision that made this epoch, for a receiver that missed it.
        dead: Processes that are proven dead. A quorum of this ballot counts no others
            as such.
        after: The step which the receiver finishes before, unless a member is lost.
            None: it suspends at once.
    """

    epoch: int
    ballot: Ballot
    base: Decision
    dead: frozenset[Member]
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Promise:
    """The sender takes part in no smaller ballot, and trains no more in this epoch.

    Attributes:
        accepted: What it has accepted last, with the ballot.
    """

    epoch: int
    ballot: Ballot
    report: Report
    accepted: tuple[Ballot, Decision] | None = None


@dataclass(frozen=True, slots=True)
class Rejected:
    """The sender has promised a ballot that is larger than the receiver's."""

    epoch: int
    promised: Ballot


@dataclass(frozen=True, slots=True)
class Propose:
    """A request to accept a decision."""

    epoch: int
    ballot: Ballot
    decision: Decision


@dataclass(frozen=True, slots=True)
class Accepted:
    """The sender has accepted the decision of the ballot."""

    epoch: int
    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Decided:
    """A quorum has accepted the decision."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class Excluded:
    """The sender is in epoch `epoch`, of which the receiver isn't a member."""

    epoch: int


Numbered = Leaving | Loss | Prepare | Promise | Rejected | Propose | Accepted
Message = Join | Decided | Excluded | Numbered


# Events: what a machine is called with.


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


# Outputs: what the caller is to do, in this order.


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
