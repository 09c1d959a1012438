"""The messages between the membership machines of workers.

Those with an `epoch` are about the choice of the one after it. Prepare, promise,
propose and accept have the meanings of Lamport, "Paxos Made Simple" (2001).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kerasdist.transport.membership.epochs import Decision, Member, Report


class Ballot(NamedTuple):
    """The number of an attempt to decide; a member promises to ignore smaller ones."""

    round: int
    proposer: Member


@dataclass(frozen=True, slots=True)
class Join:
    """The sender wants to become a member. It proves its earlier incarnations dead.

    Attributes:
        base: The decision by which it has become one; None if it isn't one yet.
    """

    base: Decision | None = None


@dataclass(frozen=True, slots=True)
class Leaving:
    """The sender wants to leave after a step."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Loss:
    """The sender has lost a member; the receiver is to propose the next epoch.

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
        dead: Processes that are proven dead. A quorum of this ballot counts no other
            ones as dead.
        after: The step that the receiver finishes first, unless a member is lost. None:
            it suspends training at once.
    """

    epoch: int
    ballot: Ballot
    base: Decision
    dead: frozenset[Member]
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Promise:
    """The sender takes part in no smaller ballot, and finishes nothing in this epoch.

    Attributes:
        accepted: The decision that it accepted last, and its ballot.
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


@dataclass(frozen=True, slots=True)
class Gone:
    """The sender has stopped: it is as good as dead."""


Numbered = Leaving | Loss | Prepare | Promise | Rejected | Propose | Accepted
Message = Join | Decided | Excluded | Gone | Numbered
