"""The machine by which a worker agrees with the others on the next epoch.

Each change of epoch is one instance of Paxos (Lamport, "Paxos Made Simple", 2001) among
the members of the present epoch, which its outcome replaces, as in "Vertical Paxos and
Primary-Backup Replication" (Lamport, Malkhi, Zhou, 2009).

    P: the proposer, the first member that isn't lost     M: each member, also P

    1. M -> P  LOSS      M has lost a member
    2. P -> M  PREPARE   P asks all members to suspend training, with a new ballot
    3. M -> P  PROMISE   M's progress, and the decision that it accepted last, if any
    4. P -> M  PROPOSE   the decision accepted in the largest ballot; if there is none,
                         one of P's own, made from the promises of a quorum
    5. M -> P  ACCEPTED  when P has a quorum of these, the decision is made
    6. P -> M  DECIDED   M installs the new epoch

Another loss during 2. to 5. starts a larger ballot. If P is lost, the next member
proposes, and finds in 3. what P may have decided. A message of an earlier epoch is
answered by DECIDED if its sender is a member of the present one, else by an elder with
EXCLUDED: the others can't rule out that the sender is the one that may continue.

A change may also be planned. By JOIN a process asks all members to become one of them,
by LEAVING a member asks P to be left out. Then PREPARE names a collective that each
member finishes before 3., so that nothing is aborted. P plans one, too, when all
members may become elders. GONE is the last message of a process.

A newcomer proposes nothing, and answers no message of an earlier epoch, until it knows
that all members are in its epoch: the decision by which it joined may have died with
the other processes that knew it. It sends the decision with JOIN. A member learns it
from there, unless it has accepted another one that those that live may decide alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from kerasdist.collectives.elastic.epochs import (
    Accepted,
    Ballot,
    Decided,
    Decision,
    Excluded,
    Gone,
    Install,
    Join,
    LeaveRequest,
    Loss,
    Member,
    Message,
    Numbered,
    Output,
    Prepare,
    Promise,
    Propose,
    Rejected,
    Send,
    Stop,
    StopReason,
    Suspend,
    SuspensionReport,
    TooLate,
    is_quorum,
    next_decision,
)

# One attempt to decide, as its proposer sees it.


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
    """A ballot: the promises it has received, then the votes for its proposal.

    Attributes:
        request: The request for promises.
        promises: Those received; not to be changed.
        proposal: What is proposed; None as long as promises are missing.
        votes: Members that have accepted the proposal.
    """

    request: Prepare
    promises: Mapping[Member, Promise] = dataclasses.field(default_factory=dict)
    proposal: Decision | None = None
    votes: frozenset[Member] = frozenset()

    def awaits(self, silent: frozenset[Member]) -> bool:
        """Return whether a member in contact, or a quorum, hasn't promised yet."""
        members, dead = self.request.base.epoch.members, self.request.dead
        if len(self.promises) + len(dead) + len(silent) < len(members):
            return True  # each promise of many members asks
        if set(members) - dead - silent - self.promises.keys():
            return True
        return not self.is_quorum(self.promises)

    def has_no_elder(self) -> bool:
        """Return whether all elders are dead, and all others have promised."""
        epoch = self.request.base.epoch
        others = set(epoch.members) - self.request.dead
        return epoch.elders <= self.request.dead and others <= self.promises.keys()

    def is_quorum(self, voters: Collection[Member]) -> bool:
        """Return whether `voters` may decide."""
        return is_quorum(voters, self.request.base.epoch.members, self.request.dead)

    def earlier(self) -> Decision | None:
        """Return what must be proposed, since it may have been decided already."""
        accepted = [
            promise.accepted
            for promise in self.promises.values()
            if promise.accepted is not None
        ]
        return max(accepted, key=lambda each: each[0])[1] if accepted else None

    def reports(self) -> dict[Member, SuspensionReport]:
        """Return the reports of those that have promised."""
        return {member: each.report for member, each in self.promises.items()}


# A planned change comes after this many collectives, so that all members know of it in
# time. The others may be in the one after the proposer's already.
_AHEAD = 2


class PaxosParticipant:
    """One worker's part in the agreement. Deterministic; not safe for several threads.

    All attributes have immutable values: `copy.copy` makes an independent machine.

    Args:
        me: This process.
        decision: The epoch in which it starts; None if it wants to join.
        min_workers: The smallest number of workers that may continue.

    Attributes:
        decision: The present epoch, and the verdict by which it began.
        progress: The number of the last collective that this worker has finished; None
            until a newcomer has the state.
        suspended: Whether training waits for the next epoch.
        confirmed: Whether all members are known to be in the present epoch.
        stopped: Why this worker takes no further part; None if it does.
    """

    _attempts = Attempt

    def __init__(
        self, me: Member, decision: Decision | None = None, *, min_workers: int = 1
    ) -> None:
        self.me = me
        self.decision = decision
        self.progress = 0 if decision is not None else None
        self.suspended = False
        self.confirmed = False
        self.stopped: StopReason | None = None
        self._min_workers = min_workers
        self._outputs: tuple[Output, ...] = ()
        self._dead: frozenset[Member] = frozenset()
        self._silent: frozenset[Member] = frozenset()
        self._joiners: tuple[Member, ...] = ()
        self._leavers: frozenset[Member] = frozenset()
        # Of the acceptor. `_planned`: a request whose collective isn't finished yet.
        self._promised: Ballot | None = None
        self._accepted: tuple[Ballot, Decision] | None = None
        self._planned: tuple[Member, Prepare] | None = None
        # What it has accepted in a ballot that the rest of the living may decide alone.
        self._bound: Decision | None = None
        # Of the proposer.
        self._round = 0
        self._attempt: Attempt | None = None

    @property
    def planning(self) -> bool:
        """Whether this worker knows of a change that is to come."""
        return bool(
            self._joiners
            or self._leavers
            or self._planned is not None
            or self._attempt is not None
        )

    def handle(self, step: Callable[..., None], *args: Any) -> tuple[Output, ...]:
        """Take an event and return what is to be done.

        Args:
            step: What the event is: one of this machine's public methods below.
            args: Its arguments.
        """
        if self.stopped is not None:
            return ()
        step(*args)
        if self.stopped is None and self._has_no_elder():
            self._stop(StopReason.NO_ELDER)
        outputs, self._outputs = self._outputs, ()
        return outputs

    # This worker's own progress.

    def finish(self, epoch: int, number: int, fetched: bool = False) -> None:
        """Note that this worker has the result of a collective.

        Args:
            epoch: The number of the epoch in which it has it.
            number: The number of the collective.
            fetched: Whether the result is from another worker. If not, each member of
                the epoch must have begun the collective, an all-reduce or a barrier,
                not a broadcast: it proves that all members are in the epoch.
        """
        if self.decision is None:
            return
        if self.suspended or epoch != self.decision.epoch.number:
            # A promise has reported less.
            self._outputs += (TooLate(),)
            return
        self.progress = number
        if not fetched and not self.confirmed:
            self.confirmed = True
            self._review()
        if self._planned is not None:
            self._on_prepare(*self._planned)

    # Plans.

    def apply(self, members: tuple[Member, ...]) -> None:
        """Ask members to let this process join.

        Repeated until the first collective is finished.
        """
        if self.decision is None or self._is_guest():
            for member in members:
                self._send(member, Join(self.decision))

    def leave(self) -> None:
        """Note that this worker wants to leave after its collective."""
        self._leavers |= {self.me}
        self._review()

    def retry(self) -> None:
        """Try again: on a regular occasion, about once per second."""
        if self.suspended:
            self.change()
        else:
            self._review()

    def give_up(self) -> None:
        """Stop if training has been suspended for longer than the job is to wait."""
        if self.suspended:
            self._stop(StopReason.NO_QUORUM)

    # Losses.

    def bury(self, member: Member) -> None:
        """Note that a process is proven dead: its host refuses a connection to it.

        An ended connection is no proof. Neither is one that can't be made. Also of
        absent processes: the epoch's first member has use for the proof while an elder
        lives.
        """
        if member in self._dead:
            return
        self._dead |= {member}
        self._joiners = tuple(each for each in self._joiners if each != member)
        if self.decision is None:
            return
        epoch = self.decision.epoch
        if member in epoch.members or (self.suspended and member in epoch.absent):
            self.change()
        elif member in epoch.absent:
            self._review()

    def miss(self, member: Member) -> None:
        """Note that a process is out of contact; whether it lives is unknown.

        Also if its connection has ended, and can't be continued without a gap.
        """
        self._silent |= {member}
        if self.decision is None or member not in self.decision.epoch.members:
            return
        if self._attempt is not None and self._attempt.request.after is None:
            self._propose()
        else:
            self.change()

    def _review(self) -> None:
        """Start what the present epoch needs: a change, or a planned one."""
        if self.decision is None or self.suspended:
            return
        members = self.decision.epoch.members
        if any(each in self._dead or each in self._silent for each in members):
            self.change()
        elif self._first() != self.me:
            if self.me in self._leavers:
                self._send(self._first(), LeaveRequest(self.decision.epoch.number))
        elif self._attempt is None and (
            self._joiners or self._leavers or self._may_make_all_elders()
        ):
            self._start((self.progress or 0) + _AHEAD)

    def _may_make_all_elders(self) -> bool:
        """Return whether all members would be elders of a next epoch."""
        epoch = self._present().epoch
        more = epoch.elders < set(epoch.members)
        return (
            more
            and self.confirmed
            and bool(epoch.absent)
            and epoch.absent <= self._dead
        )

    def change(self) -> None:
        """Suspend training, and start a ballot or ask the proposer for one.

        Also an event: a connection between members has ended, and both live, as far as
        is known.
        """
        if self.decision is None:
            return
        self._suspend()
        first = self._first()
        if first != self.me:
            number, confirmed = self.decision.epoch.number, self.confirmed
            self._send(first, Loss(number, self._dead_here(), confirmed))
        elif not self._is_guest():
            for member in sorted(self._present().epoch.absent - self._dead):
                self._correct(member)
            self._start(None)

    def _suspend(self) -> None:
        self._planned = None
        if not self.suspended:
            self.suspended = True
            self._outputs += (Suspend(),)

    # The proposer.

    def _start(self, after: int | None) -> None:
        decision = self._present()
        number, members = decision.epoch.number, decision.epoch.members
        self._round += 1
        ballot = Ballot(self._round, self.me)
        request = Prepare(number, ballot, decision, self._dead_here(), after)
        self._attempt = self._attempts(request)
        self._send_all(members, request)

    def _on_promise(self, sender: Member, message: Promise) -> None:
        attempt = self._attempt
        if attempt is not None and message.ballot == attempt.request.ballot:
            promises = {**attempt.promises, sender: message}
            self._attempt = dataclasses.replace(attempt, promises=promises)
            self._propose()

    def _propose(self) -> None:
        """Propose a decision when all members in contact have promised."""
        attempt = self._attempt
        if attempt is None or attempt.proposal is not None:
            return
        if attempt.awaits(self._silent):
            return
        proposal = attempt.earlier() or self._choice(attempt)
        if proposal is not None:
            self._attempt = dataclasses.replace(attempt, proposal=proposal)
            request = attempt.request
            message = Propose(request.epoch, request.ballot, proposal)
            self._send_all(tuple(attempt.promises), message)
        elif attempt.has_no_elder():
            self._stop(StopReason.NO_ELDER)

    def _choice(self, attempt: Attempt) -> Decision | None:
        joiners = tuple(each for each in self._joiners if each not in self._silent)
        return next_decision(
            self._present().epoch,
            attempt.reports(),
            joiners,
            attempt.request.dead,
            self._min_workers,
        )

    def _on_accepted(self, sender: Member, message: Accepted) -> None:
        attempt = self._attempt
        if attempt is None or message.ballot != attempt.request.ballot:
            return
        votes, proposal = attempt.votes | {sender}, attempt.proposal
        self._attempt = dataclasses.replace(attempt, votes=votes)
        if proposal is not None and attempt.is_quorum(votes):
            others = dict.fromkeys(self._present().epoch.members)
            others |= dict.fromkeys(proposal.epoch.members)
            others.pop(self.me, None)
            self._send_all(tuple(others), Decided(proposal))
            self._learn(proposal)

    # The acceptor.

    def _on_prepare(self, sender: Member, message: Prepare) -> None:
        # Before the promise: no later message of a dead process may change what this
        # worker knows.
        self._dead |= message.dead
        if self._promised is not None and message.ballot < self._promised:
            self._send(sender, Rejected(message.epoch, self._promised))
            return
        if message.after is not None and not self.suspended:
            self._planned = sender, message
            if self.progress is None or self.progress < message.after:
                return
        self._suspend()
        self._promised = message.ballot
        self._round = max(self._round, message.ballot.round)
        leaving = self.me in self._leavers
        report = SuspensionReport(self.progress, self._silent, leaving, self.confirmed)
        promise = Promise(message.epoch, message.ballot, report, self._accepted)
        self._send(sender, promise)

    def _on_propose(self, sender: Member, message: Propose) -> None:
        if message.ballot == self._promised:
            self._accepted = message.ballot, message.decision
            members = self._present().epoch.members
            if not is_quorum(set(members) - self._dead, members, ()):
                self._bound = message.decision
            self._send(sender, Accepted(message.epoch, message.ballot))

    def _learn(self, decision: Decision) -> None:
        """Install a later epoch, or stop."""
        epoch, present = decision.epoch, self.decision
        if present is not None and epoch.number <= present.epoch.number:
            same = epoch.number == present.epoch.number
            if same and self._is_guest() and decision != present:
                # All that knew the decision by which this one joined are dead.
                self._stop(StopReason.EXCLUDED)
            return
        if decision.verdict.stop is not None:
            self._stop(decision.verdict.stop)
        elif self.me not in epoch.members:
            self._stop(StopReason.EXCLUDED, epoch.members)
        else:
            self._install(decision)

    def _install(self, decision: Decision) -> None:
        epoch = decision.epoch
        self.decision = decision
        if self.me in epoch.newcomers:
            self.progress = None
        self.suspended = False
        self.confirmed = len(epoch.members) == 1
        self._silent &= {*epoch.members, *self._joiners}
        self._joiners = tuple(m for m in self._joiners if m not in epoch.members)
        self._leavers &= set(epoch.members)
        self._promised = self._accepted = self._planned = self._attempt = None
        self._bound = None
        self._outputs += (Install(decision),)
        self._review()

    # Messages.

    def receive(self, sender: Member, message: Message) -> None:
        """Take a message of `sender`."""
        if sender in self._dead:
            return
        self._silent -= {sender}
        match message:
            case Join():
                self._on_join(sender, message.base)
            case Decided():
                self._learn(message.decision)
            case Excluded():
                number = -1 if self.decision is None else self.decision.epoch.number
                if message.epoch > number:
                    self._stop(StopReason.EXCLUDED, (sender,))
            case Gone():
                self.bury(sender)
            case _:
                if isinstance(message, Prepare):
                    self._learn(message.base)
                if self.decision is None or self.stopped is not None:
                    return
                epoch = self.decision.epoch
                if message.epoch < epoch.number:
                    # The decision is on its way to those that have answered, which
                    # may be half of all members.
                    if not isinstance(message, Promise | Accepted | Rejected):
                        self._correct(sender)
                elif message.epoch == epoch.number and sender in epoch.members:
                    self._dispatch(sender, message)

    def _dispatch(self, sender: Member, message: Numbered) -> None:
        match message:
            case Prepare():
                self._on_prepare(sender, message)
            case Promise():
                self._on_promise(sender, message)
            case Propose():
                self._on_propose(sender, message)
            case Accepted():
                self._on_accepted(sender, message)
            case Rejected():
                self._round = max(self._round, message.promised.round)
            case LeaveRequest():
                self._leavers |= {sender}
                self._review()
            case Loss():
                self._on_loss(message)

    def _on_loss(self, message: Loss) -> None:
        self.confirmed |= message.confirmed
        news = not message.dead <= self._dead
        self._dead |= message.dead
        attempt = self._attempt
        if news or attempt is None or attempt.request.after is not None:
            self.change()

    def _on_join(self, joiner: Member, base: Decision | None) -> None:
        if self.decision is None:
            return
        free = self._bound is None or self._bound == base
        if base is not None and self.me in base.epoch.members and free:
            self._learn(base)
        epoch = self._present().epoch
        known = {*epoch.members, *epoch.absent, *self._joiners}
        same = sorted(other for other in known if other.id == joiner.id)
        if joiner in epoch.members or joiner in epoch.absent:
            self._correct(joiner)
        elif not same or same[-1] < joiner:
            self._joiners += (joiner,)
            for other in same:
                self.bury(other)
            self._review()

    def _correct(self, sender: Member) -> None:
        """Answer a process that is in an earlier epoch, or in none."""
        decision = self._present()
        epoch = decision.epoch
        if self._is_guest():
            return
        if sender in epoch.members:
            self._send(sender, Decided(decision))
        elif self.me in epoch.elders or (self.confirmed and not epoch.absent):
            self._send(sender, Excluded(epoch.number))

    # Helpers.

    def _present(self) -> Decision:
        if self.decision is None:
            raise RuntimeError("A worker that wants to join has no epoch yet.")
        return self.decision

    def _first(self) -> Member:
        """Return the member that is to propose."""
        for member in self._present().epoch.members:
            if member not in self._dead and member not in self._silent:
                return member
        return self.me

    def _is_guest(self) -> bool:
        """Return whether the others may not know of the epoch in which this one is."""
        newcomer = self.me in self._present().epoch.newcomers
        return newcomer and not self.confirmed

    def _has_no_elder(self) -> bool:
        """Return whether an absent process may continue, and no member."""
        if self.decision is None:
            return False
        epoch = self.decision.epoch
        return bool(epoch.absent) and epoch.elders <= self._dead

    def _dead_here(self) -> frozenset[Member]:
        epoch = self._present().epoch
        return self._dead & {*epoch.members, *epoch.absent}

    def _send(self, to: Member, message: Message) -> None:
        if to == self.me:
            self.receive(to, message)
        else:
            self._outputs += (Send(to, message),)

    def _send_all(self, members: tuple[Member, ...], message: Message) -> None:
        """Send to all but the dead, to this worker last."""
        for member in members:
            if member not in self._dead and member != self.me:
                self._send(member, message)
        if self.me in members:
            self._send(self.me, message)

    def _stop(self, reason: StopReason, others: tuple[Member, ...] = ()) -> None:
        """Stop, and inform this epoch's members and `others`."""
        if self.me in self._leavers and reason is StopReason.EXCLUDED:
            reason = StopReason.LEFT
        self.stopped = reason
        members: set[Member] = set()
        silent: set[Member] = set()
        if self.decision is not None:
            epoch = self.decision.epoch
            members = {*epoch.members, *epoch.absent}
            silent = (members & self._silent) | epoch.absent
        for member in sorted({*members, *others} - self._dead - {self.me}):
            self._send(member, Gone())
        missing = tuple(sorted(silent - self._dead))
        self._outputs += (Stop(reason, missing),)
