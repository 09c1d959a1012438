"""The interface of a membership machine to its caller: events, and outputs.

The caller owns connections, timers and collectives. It passes one event at a time, and
carries out the outputs in their order. It asks by `Finished` before it uses the result
of a collective, and uses it unless the answer is `TooLate`.
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

# Events.


@dataclass(frozen=True, slots=True)
class Received:
    """A message has arrived from `sender`, which isn't this process."""

    sender: Member
    message: Message


@dataclass(frozen=True, slots=True)
class Dead:
    """The process of `member` is proven dead: its host refuses a connection to it.

    An ended connection is no proof. Neither is one that can't be made. Also of absent
    processes: the epoch's first member has use for the proof while an elder lives.
    """

    member: Member


@dataclass(frozen=True, slots=True)
class Silent:
    """`member` is out of contact; whether it lives is unknown.

    Also if its connection has ended, and can't be continued without a gap.
    """

    member: Member


@dataclass(frozen=True, slots=True)
class Broken:
    """A connection between members has ended, and both live, as far as is known."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A collective of epoch `epoch` is finished, which each member must have begun.

    Of an all-reduce or a barrier, not of a broadcast: it proves that all members are in
    the epoch.
    """

    epoch: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class Fetched:
    """This worker has received what it lacked in epoch `epoch` from another one."""

    epoch: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class Apply:
    """This process wants to join; repeated until the first collective is finished."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """This worker wants to leave after its step."""


@dataclass(frozen=True, slots=True)
class Timeout:
    """A regular occasion to try again, about once per second."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Training has been suspended for longer than the job is to wait."""


Event = (
    Received
    | Dead
    | Silent
    | Broken
    | Finished
    | Fetched
    | Apply
    | Leave
    | Timeout
    | GiveUp
)


# Outputs.


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to `to`. It may be lost, late, or delivered twice."""

    to: Member
    message: Message


@dataclass(frozen=True, slots=True)
class Suspend:
    """End the running collective, and begin none until `Install`."""


@dataclass(frozen=True, slots=True)
class TooLate:
    """Discard what `Finished` or `Fetched` was about."""


@dataclass(frozen=True, slots=True)
class Install:
    """Fetch what is lacking according to the verdict, then train in this epoch."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class Stop:
    """End this worker's part in the job.

    Attributes:
        reason: After EXCLUDED, and after NO_ELDER, the process may join as its next
            incarnation.
        missing: Members that are out of contact, and not proven dead.
    """

    reason: StopReason
    missing: tuple[Member, ...] = ()


Output = Send | Suspend | TooLate | Install | Stop
