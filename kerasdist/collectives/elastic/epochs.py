"""The interface of a membership machine to its caller: epochs, messages, and outputs.

The caller owns connections, timers and collectives. It passes one event at a time, and
carries out the outputs in their order. It asks by `PaxosParticipant.finish` before it
uses the result of a collective, and uses it unless the answer is `TooLate`.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import typing
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kerasdist.errors import ProtocolError
from kerasdist.transport.framing import MAX_CONTROL, read_record, to_json, to_plain

# Epochs of membership, and the rules by which the members of one decide the next.
#
# An epoch is a numbered list of members. They decide the next epoch by consensus
# (`kerasdist.collectives.elastic.consensus`). Two rules make that safe.
#
# **Quorum.** The members that accept the next epoch must be (a) more than half of all
# members of the present one, or (b) exactly half with the first one, the chief, or (c)
# all that aren't proven dead. The dead count in (a) and (b). If they didn't, two groups
# could continue: of 1 2 3 4, cut into 1 2 and 3 4, the former continue by (b). Then 1
# is killed. Now 2 is alone, and continues by (c); 3 and 4, which find 1 dead and 2
# silent, would be two of three.
#
# Two disjoint quorums don't both decide. Any two of (a) and (b) share a member, which
# reports what it has accepted. A quorum of (c) is all that live, so one that is
# disjoint from it is dead. That one may have decided, but none of the living has
# learned it, or will: they learn which are dead before they promise anything, and
# ignore messages of the dead from then on. Of two of (c), each would have been dead
# before the other one.
#
# **Elders.** A member that was excluded while it was silent may wake up when all
# members that it knows are dead: it is a quorum by (c) of its old epoch. The others may
# live on as workers that have joined since. So each next epoch keeps an elder: a member
# that is known to all processes that may live in an earlier epoch, which don't continue
# while it lives. All members become elders when all are known to be in the present
# epoch, and the absent ones, which were excluded, are proven dead while an elder lives.
#
# After the last elder's death there is no next epoch: the others stop, and may join an
# absent one. Therefore a host that vanishes, and is never proven dead, ends a job that
# loses all members from before that, though workers that have joined since would be a
# majority. No rule without clocks is better. Where all members but the absent one die,
# that one has to continue if no worker has joined them, and can't know whether one has.
# Nor does a later proof of its death help: it may have continued before it died, with
# newcomers of its own, of which the others can't know.


class Member(NamedTuple):
    """A process that is, was or wants to be a worker of the job.

    Attributes:
        id: The number of its task, the same after a restart.
        incarnation: Larger after each restart of the task, and after each exclusion of
            the process, which has given up its earlier place then.
    """

    id: int
    incarnation: int = 0


class StopReason(enum.Enum):
    """Why a worker stops."""

    NO_QUORUM = "the workers that are in contact may not continue without the others"
    TOO_FEW = "fewer workers than min_workers are left"
    NO_ELDER = "others may have continued without this worker"
    EXCLUDED = "the others have continued without this worker"
    LEFT = "this worker has left as it announced"


@dataclass(frozen=True, slots=True)
class Epoch:
    """Workers that train together.

    Attributes:
        number: One more than that of the epoch before.
        members: By rank; the first one is the chief.
        newcomers: Those that weren't in the epoch before, and have no state yet.
        elders: Those known to each process that may live in an earlier epoch; one of
            them has to live at the next decision.
        absent: Former members that may live, and not know that they were excluded.
    """

    number: int
    members: tuple[Member, ...]
    newcomers: tuple[Member, ...] = ()
    elders: frozenset[Member] = frozenset()
    absent: frozenset[Member] = frozenset()


@dataclass(frozen=True, slots=True)
class CollectiveVerdict:
    """The fate of the collective during which an epoch ended.

    All collectives up to `progress` are finished; the next one is aborted wherever it
    has begun, and done again in the new epoch.

    Attributes:
        progress: The largest of the members that stay.
        furthest: Those that have finished that one. The other members get its result
            from one of them; newcomers the whole state.
        stop: Why there is no next epoch; None if there is one.
    """

    progress: int
    furthest: tuple[Member, ...]
    stop: StopReason | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """An epoch, and the verdict on the collective before: what consensus is about."""

    epoch: Epoch
    verdict: CollectiveVerdict


@dataclass(frozen=True, slots=True)
class SuspensionReport:
    """The knowledge of a member that has suspended training.

    Attributes:
        progress: The number of the last collective that it has finished, over all
            epochs; None if it has no state yet.
        silent: Members that it isn't in contact with.
        leaving: Whether it wants to leave.
        confirmed: Whether all members are known to be in this epoch.
    """

    progress: int | None
    silent: frozenset[Member] = frozenset()
    leaving: bool = False
    confirmed: bool = False


def first_decision(members: tuple[Member, ...]) -> Decision:
    """Return the epoch in which a job starts."""
    epoch = Epoch(0, members, elders=frozenset(members))
    return Decision(epoch, CollectiveVerdict(0, members))


def is_quorum(
    voters: Collection[Member], members: tuple[Member, ...], dead: Collection[Member]
) -> bool:
    """Return whether `voters` may decide for `members`, of which `dead` are dead."""
    # Among many members most questions are asked while there are too few voters.
    if 2 * len(voters) >= len(members):
        twice = 2 * sum(member in voters for member in members)
        if twice > len(members) or (twice == len(members) and members[0] in voters):
            return True
    return all(member in voters or member in dead for member in members)


def next_decision(
    epoch: Epoch,
    reports: Mapping[Member, SuspensionReport],
    joiners: tuple[Member, ...],
    dead: frozenset[Member],
    min_workers: int,
) -> Decision | None:
    """Return what to propose after `epoch`; None while there may be no next epoch.

    Args:
        epoch: The present epoch.
        reports: Those of a quorum of its members, all of which have suspended training.
        joiners: Processes that want to join.
        dead: Processes that were proven dead before the members reported.
        min_workers: The smallest number of workers that may continue.
    """
    elders = epoch.elders
    # An elder that has reported, or has begun a collective with all others, was alive
    # when the absent ones were dead.
    proven = not epoch.absent or (epoch.absent <= dead and elders & reports.keys())
    if proven and any(report.confirmed for report in reports.values()):
        elders = frozenset(epoch.members)
    for leaving in (True, False):
        # If those that stay can't continue, those that want to leave have to stay, too.
        staying = _in_contact(epoch, reports, leaving=leaving)
        members = (*staying, *joiners)
        reached = {
            member: progress
            for member in staying
            if (progress := reports[member].progress) is not None
        }
        if not members or (reached and elders & set(staying)):
            break
    else:
        return None
    stop = StopReason.TOO_FEW if len(members) < min_workers else None
    if not members:
        stop = StopReason.LEFT
    absent = (epoch.absent | set(epoch.members)) - {*members, *dead}
    new = Epoch(epoch.number + 1, members, joiners, elders & set(staying), absent)
    last = max(reached.values(), default=0)
    furthest = tuple(member for member in reached if reached[member] == last)
    return Decision(new, CollectiveVerdict(last, furthest, stop))


def _in_contact(
    epoch: Epoch, reports: Mapping[Member, SuspensionReport], *, leaving: bool
) -> list[Member]:
    """Return members, each in contact with each other one, by rank.

    Args:
        epoch: The present epoch.
        reports: The members to choose from.
        leaving: Whether those that want to leave are left out.
    """
    chosen: dict[Member, None] = {}
    missed: set[Member] = set()  # by those that are chosen
    for member in epoch.members:
        if member not in reports or (leaving and reports[member].leaving):
            continue
        silent = reports[member].silent
        if member not in missed and not any(other in chosen for other in silent):
            chosen[member] = None
            missed |= silent
    return list(chosen)


# The messages between the membership machines of workers.
#
# Those with an `epoch` are about the choice of the one after it. Prepare, promise,
# propose and accept have the meanings of Lamport, "Paxos Made Simple" (2001).


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
class LeaveRequest:
    """The sender wants to leave after a collective."""

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
        after: The collective that the receiver finishes first, unless a member is lost.
            None: it suspends training at once.
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
    report: SuspensionReport
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


Numbered = LeaveRequest | Loss | Prepare | Promise | Rejected | Propose | Accepted
Message = Join | Decided | Excluded | Gone | Numbered


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
    """Discard the result that `PaxosParticipant.finish` was about."""


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


# The messages of the agreement as bytes: compressed JSON, checked field by field.
#
# Those of a large job name its members several times, which hardly makes them longer.

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in typing.get_args(Message)
}
# The fastest: members' names differ little.
_LEVEL = 1


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    value = {"kind": type(message).__name__, "fields": to_plain(message)}
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), _LEVEL)


def decode(payload: bytes, tasks: Collection[int] | None = None) -> Message:
    """Return the argument of `encode`.

    Args:
        payload: The bytes.
        tasks: The ids that members may have; None: any.

    Raises:
        ProtocolError: The bytes aren't a message, or more than a control frame has,
            compressed or not; or it's about a member that there can't be.
    """
    value = to_json(_expanded(payload))
    kind = _KINDS.get(str(value.get("kind")))
    if kind is None:
        raise ProtocolError(
            "A message about membership is of no known kind. "
            f"Received: {str(value.get('kind'))[:50]!r}."
        )
    message: Message = read_record(
        value.get("fields"), kind, "A message about membership"
    )
    unknown = {each.id for each in _members(message)} - {*(tasks or ())}
    if tasks is not None and unknown:
        raise ProtocolError(
            f"A message about membership names ranks {sorted(unknown)[:10]}, and the "
            f"job has {len(tasks)} tasks."
        )
    return message


def _members(value: Any) -> Iterator[Member]:
    """Yield the members that a message names."""
    if isinstance(value, Member):
        yield value
    elif isinstance(value, (tuple, frozenset)):
        for each in value:
            yield from _members(each)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _members(getattr(value, field.name))


def _expanded(payload: bytes) -> bytes:
    if len(payload) > MAX_CONTROL:
        raise ProtocolError(
            "A message about membership is too long. "
            f"Received: {len(payload)} bytes, expected at most {MAX_CONTROL}."
        )
    expanding = zlib.decompressobj()
    try:
        text = expanding.decompress(payload, MAX_CONTROL + 1)
    except zlib.error as error:
        raise ProtocolError(
            f"A message about membership is damaged: {error}."
        ) from None
    if len(text) > MAX_CONTROL or not expanding.eof or expanding.unused_data:
        raise ProtocolError(
            "A message about membership is damaged, or too long. "
            f"Received: {len(text)} bytes of text, expected one text of at most "
            f"{MAX_CONTROL}."
        )
    return text
