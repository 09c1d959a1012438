"""The agreement of this worker with the others on epochs, as a running machine.

`kerasdist.collectives.elastic.consensus` decides; this module gives it events in the
order in which they happen, in any thread, and carries out its outputs.

A process that was frozen may find all others dead when it wakes up. They may have
continued without it, and finished the job; so it must not continue alone.

Processes that want to join wait until the members admit them, at a point in the script
where all members are outside of sections.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from kerasdist.collectives.elastic.consensus import PaxosParticipant
from kerasdist.collectives.elastic.epochs import (
    Decision,
    Install,
    Join,
    Member,
    Message,
    Send,
    Stop,
    StopReason,
    Suspend,
    TooLate,
)
from kerasdist.collectives.elastic.peer_messenger import (
    Contact,
    PeerMessenger,
    Startup,
    discover_members,
)
from kerasdist.transport.deadline import daemon

# Looks for members, each in a thread of its own: a contact takes seconds.
#
# One look for a member in an epoch runs at a time; it also answers what is asked for
# meanwhile.

ALL = frozenset(Contact)
# The answers that show a loss.
LOSSES = frozenset({Contact.DEAD, Contact.SILENT})
# The answer that proves one.
PROOF = frozenset({Contact.DEAD})
_LOOK = "kerasdist-contact"

_TICK_SECONDS = 1.0
_CLOSE_SECONDS = 5.0
# Seconds between two looks for an absent process while the others train: the first two
# of an epoch, and at most. As long as one is absent, too few of the members are elders.
_ABSENT_SECONDS = 0.5, 5.0


class Follower(Protocol):
    """Follows the decisions, by methods that don't wait, called by several threads."""

    def suspend(self) -> None:
        """End the running collective; begin none until `install`."""

    def install(self, decision: Decision) -> None:
        """Form this epoch."""

    def stop(self, reason: StopReason, missing: tuple[int, ...]) -> None:
        """End this worker's part in the job.

        Args:
            reason: Why.
            missing: The ids of members that are out of contact.
        """


class MembershipService:
    """The membership machine of this worker.

    Args:
        decision: The epoch in which it starts; None if it wants to join.
        lines: This worker's lines; owned from now on.
        min_workers: The smallest number of workers that may continue.
        patience: Seconds after which a job that can't continue stops.
        silence: Seconds of silence after which the others count this worker as lost.
        follower: See `Follower`.
        startup: The start of the job, until `formed` is called; None if it runs.
    """

    def __init__(
        self,
        decision: Decision | None,
        lines: PeerMessenger,
        min_workers: int,
        patience: float,
        silence: float,
        follower: Follower,
        startup: Startup | None = None,
    ) -> None:
        self._me = lines.me
        self._startup = startup
        self._patience = patience
        self._silence = silence
        self._tick = time.monotonic()
        self._woken = False
        self._follower = follower
        self._lock = threading.RLock()
        self._machine = PaxosParticipant(lines.me, decision, min_workers=min_workers)
        # Those that want to join, with their requests.
        self._waiting: dict[Member, Join] = {}
        self._admits = False
        # The members that this worker asks to admit it.
        self._hosts: tuple[Member, ...] = ()
        self._since: float | None = None
        self._stop = threading.Event()
        # The looks that run, with the answers that matter.
        self._looks: dict[tuple[int, Member], frozenset[Contact]] = {}
        self._asks_hosts = False
        self._next_look = 0.0
        self._look_pause = 0.0
        # Whether the members of the present epoch are being connected.
        self._forms = False
        self._lines = lines
        if decision is not None and startup is None:
            lines.members = decision.epoch.members
        lines.receive = self._received
        lines.replaced = self._replaced
        self._thread = daemon("kerasdist-agreement", self._run)
        self._thread.start()

    # For the communicator and the groups.

    def apply(self, members: tuple[Member, ...]) -> None:
        """Begin to ask members to admit this worker; goes on until they have."""
        with self._lock:
            self._hosts = members
            self._handle(self._machine.apply, members)

    def formed(self, epoch: int) -> None:
        """Report that this worker is connected with the members of an epoch.

        The start is over then: absent members count as later.
        """
        with self._lock:
            present = self._machine.decision
            if present is not None and present.epoch.number == epoch:
                self._forms = False
            if self._startup is not None and present is not None:
                self._startup = None
                self._lines.patience = None
                if present.epoch.number == epoch:
                    self._lines.members = present.epoch.members

    @property
    def waiting(self) -> bool:
        """Whether processes want to join."""
        with self._lock:
            return bool(self._waiting)

    def admit(self, admits: bool) -> bool:
        """Admit processes that want to join, or not from now on.

        Returns:
            Whether some are being admitted.
        """
        with self._lock:
            self._admits = admits
            if admits:
                waiting, self._waiting = self._waiting, {}
                for member, message in waiting.items():
                    self._handle(self._machine.receive, member, message)
            return self._machine.planning

    def leave(self) -> bool:
        """Leave the job after one of the next collectives; can be repeated.

        Returns:
            Whether that, or another change, is still to come.
        """
        with self._lock:
            self._handle(self._machine.leave)
            return self._machine.planning

    def finished(self, epoch: int, number: int) -> bool:
        """Report a finished collective; return whether its result may be used.

        Args:
            epoch: The epoch of the group that finished it.
            number: Its number in the job, over all epochs.
        """
        return self._done(epoch, number)

    def fetched(self, epoch: int, number: int, keep: Callable[[], None]) -> bool:
        """Report the result of a collective that another member has finished.

        Args:
            epoch: The epoch of the group that gave it.
            number: The collective's number.
            keep: Called if the result is to be used, before any later change.

        Returns:
            Whether it is.
        """
        with self._lock:
            used = self._done(epoch, number, True)
            if used:
                keep()
        return used

    def lost(self, epoch: int, member: Member | None) -> None:
        """Report that the group of an epoch is broken, in a thread of its own.

        Args:
            epoch: The epoch.
            member: The member that may be the cause, if one is known.
        """
        with self._lock:
            if self._is_present(epoch):
                self._look_for(epoch, None if member == self._me else member)

    def close(self) -> None:
        """End threads and lines. Can be called twice."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)
        self._lines.close()

    # The machine.

    def _done(self, epoch: int, number: int, fetched: bool = False) -> bool:
        outputs = self._handle(self._machine.finish, epoch, number, fetched)
        return not any(isinstance(output, TooLate) for output in outputs)

    def _received(self, sender: Member, message: Message) -> None:
        with self._lock:
            # A member that lives says whether this one has been excluded.
            self._note_time()
            self._woken = False
            if isinstance(message, Join) and message.base is None:
                self._note_joiner(sender, message)
            else:
                self._handle(self._machine.receive, sender, message)

    def _replaced(self, member: Member) -> None:
        """Note that the task of a member has a new process."""
        with self._lock:
            self._handle(self._machine.bury, member)

    def _note_joiner(self, sender: Member, message: Join) -> None:
        for member in self._members():
            if member.id == sender.id and member < sender:
                # Its task was started again.
                self._handle(self._machine.bury, member)
        if self._admits or sender in self._members():
            self._handle(self._machine.receive, sender, message)
        else:
            self._waiting = {
                other: each
                for other, each in self._waiting.items()
                if other.id != sender.id or other > sender
            }
            self._waiting[sender] = message

    def _handle(self, step: Callable[..., None], *args: Any) -> tuple[object, ...]:
        """Pass an event to the machine, and carry out what it answers, in order."""
        with self._lock:
            outputs = self._machine.handle(step, *args)
            for output in outputs:
                match output:
                    case Send():
                        self._lines.send(output.to, output.message)
                    case Suspend():
                        self._since = self._since or time.monotonic()
                        self._follower.suspend()
                    case Install():
                        self._since = None
                        self._next_look = 0.0
                        self._look_pause = _ABSENT_SECONDS[0]
                        self._forms = True
                        self._lines.members = output.decision.epoch.members
                        self._follower.install(output.decision)
                    case Stop():
                        missing = tuple(member.id for member in output.missing)
                        self._follower.stop(output.reason, missing)
            return outputs

    def _look_for(
        self, epoch: int, member: Member | None, counts: frozenset[Contact] = ALL
    ) -> None:
        """Find out what has become of a member.

        Args:
            epoch: The epoch in which it is looked for.
            member: The member; None: a connection broke, and no member is the cause.
            counts: The answers that matter; others change nothing.
        """
        if member is not None:
            known = self._looks.get((epoch, member))
            self._looks[epoch, member] = counts | (known or frozenset())
            if known is not None:
                return

        def look() -> None:
            contact = Contact.ALIVE if member is None else self._lines.contact(member)
            with self._lock:
                matter = ALL
                if member is not None:
                    matter = self._looks.pop((epoch, member))
                self._found(epoch, member, contact, matter)

        daemon(_LOOK, look).start()

    def _look_for_hosts(self) -> None:
        """Look for other members if all that could admit this worker have ended.

        They may have been lost since it asked for them, and others have joined.
        """
        if self._asks_hosts:
            return
        self._asks_hosts, hosts = True, self._hosts

        def look() -> None:
            dead = all(self._lines.contact(host) is Contact.DEAD for host in hosts)
            answers = (
                discover_members(self._lines, members=True).answers if dead else []
            )
            with self._lock:
                self._asks_hosts = False
                if self._machine.decision is not None or self._stop.is_set():
                    return
                if answers:
                    self._hosts = answers[0].members
                elif dead:
                    self._follower.stop(StopReason.EXCLUDED, ())

        daemon(_LOOK, look).start()

    def _found(
        self,
        epoch: int,
        member: Member | None,
        contact: Contact,
        counts: frozenset[Contact],
    ) -> None:
        """Report to the machine what has become of a member, with the lock."""
        if self._stop.is_set() or not self._is_present(epoch):
            return
        if self._startup is not None and member is not None:
            found = self._startup.counted(member, contact)
            if found is Contact.EXCLUDES:
                self._follower.stop(StopReason.EXCLUDED, ())
            if found is None or found is Contact.EXCLUDES:
                return
            contact = found
        if contact not in counts:
            return
        if member is not None and contact is Contact.DEAD:
            self._note_time()
            if not self._woken:
                self._handle(self._machine.bury, member)
            elif member in self._members():
                self._follower.stop(StopReason.EXCLUDED, ())
        elif member is not None and contact is Contact.SILENT:
            self._handle(self._machine.miss, member)
        elif not self._machine.suspended:
            # All live: only a connection has broken.
            self._handle(self._machine.change)

    def _members(self) -> tuple[Member, ...]:
        present = self._machine.decision
        return () if present is None else present.epoch.members

    def _is_present(self, epoch: int) -> bool:
        present = self._machine.decision
        return present is not None and present.epoch.number == epoch

    def _note_time(self) -> None:
        """Note whether this process was frozen for longer than the others waited."""
        now = time.monotonic()
        self._woken |= now - self._tick > self._silence
        self._tick = now

    def _run(self) -> None:
        while not self._stop.wait(min(_TICK_SECONDS, self._silence / 4)):
            with self._lock:
                self._note_time()
                if self._hosts:
                    self._handle(self._machine.apply, self._hosts)
                if self._hosts and self._machine.decision is None:
                    self._look_for_hosts()
                if self._startup is not None:
                    self._follow_start(self._startup)
                self._look_around()
                late = (
                    self._since is not None
                    and time.monotonic() - self._since > self._patience
                )
                self._handle(self._machine.give_up if late else self._machine.retry)

    def _follow_start(self, startup: Startup) -> None:
        """Look for members that are lost before all are connected."""
        decision = self._machine.decision
        if decision is None or decision.epoch.number:
            return
        if self._since is not None and not startup.expired:
            # Members that start late may still take part in the agreement.
            self._since = time.monotonic()
        for member in startup.dead():
            self._handle(self._machine.bury, member)
        if startup.expired and not startup.is_majority():
            missing = tuple(member.id for member in startup.absent())
            self._follower.stop(StopReason.NO_QUORUM, missing)
        for member in startup.to_look_for():
            self._look_for(decision.epoch.number, member, LOSSES)

    def _look_around(self) -> None:
        """Look for the other members while there's no agreement.

        One that is silent, or doesn't answer messages, may have died since. One that
        dies while the epoch's members are being connected may have no connection yet
        whose end would show it. While they train, the first one looks for absent
        processes, from time to time: if all are dead, newcomers can do without the
        earlier members.
        """
        decision = self._machine.decision
        if decision is None:
            return
        epoch = decision.epoch
        if not self._machine.suspended:
            now = time.monotonic()
            first = epoch.members[0]
            if self._forms and self._startup is None:
                for member in epoch.members if first == self._me else (first,):
                    if member != self._me:
                        self._look_for(epoch.number, member, PROOF)
            if first == self._me and now >= self._next_look:
                self._next_look = now + self._look_pause
                self._look_pause = min(2 * self._look_pause, _ABSENT_SECONDS[1])
                for member in sorted(epoch.absent):
                    self._look_for(epoch.number, member, LOSSES)
            return
        for member in (*epoch.members, *sorted(epoch.absent)):
            if member != self._me:
                self._look_for(epoch.number, member)
