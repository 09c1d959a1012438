"""The start of an elastic job, in which some of its workers may be lost already.

Tasks start at different moments, minutes apart on a cluster. So a task at whose address
nothing listens may not have started yet. During the start a member's absence counts
only in these cases:

    it was in contact before           as later: it is dead if nothing listens there any
                                       more, and silent if it doesn't answer
    the launcher reports that its      it is dead
    process has ended for good
    the start's time-out is over       it is silent: a refused connection proves
                                       nothing, as it may be a firewall's

A process that was started again after a loss doesn't know of the job. If its network is
cut, it must not begin the job from the start while the others train. Therefore more
than half of the members must have been in contact when the time-out counts: exactly
half with the chief aren't enough, as they are later.

More than half may have been started again, too: the rest continues if it has proof that
they are dead. So absent members are looked for until the end, and a last look, which
takes a few seconds, decides. By its answer a member of a job that runs excludes those
that start. Only if it gives none from the survey until that look, there are two jobs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from kerasdist import errors
from kerasdist.collectives.elastic.membership.lines import Contact, Lines
from kerasdist.transport.membership.epochs import Member, StopReason
from kerasdist.transport.rendezvous.probe import why_unreachable
from kerasdist.transport.rendezvous.startup import missing_error
from kerasdist.transport.timeouts import Timeouts

# Members that one of them looks for at a time.
_MOST_LOOKS = 16
# Looks per second, of all members at the first one.
_LOOKS_PER_SECOND = 50
_PROBE_SECONDS = 2.0


class Startup:
    """The knowledge of one worker about the members that start with it.

    Not safe for several threads.

    Args:
        me: This worker.
        members: Those with which the job starts.
        lines: This worker's lines. Their `patience` is the time-out of the start.
        timeouts: The time limits of the job.
        ended: Returns the tasks whose processes have ended for good, according to the
            launcher.

    Attributes:
        members: See above.
    """

    def __init__(
        self,
        me: Member,
        members: tuple[Member, ...],
        lines: Lines,
        timeouts: Timeouts,
        ended: Callable[[], frozenset[int]],
    ) -> None:
        self._me = me
        self.members = members
        self._lines = lines
        self._seconds = timeouts.startup
        self._silence = timeouts.heartbeat
        self._ended = ended
        # Since when members don't answer that were in contact.
        self._silent: dict[Member, float] = {}
        self._next_look = 0.0
        self._turn = 0

    @property
    def expired(self) -> bool:
        """Whether the time-out of the start is over."""
        patience = self._lines.patience
        return patience is None or patience.expired

    def dead(self) -> list[Member]:
        """Return the members whose processes the launcher reports as ended."""
        ended = self._ended()
        return [member for member in self.members if member.id in ended]

    def to_look_for(self) -> list[Member]:
        """Return the members for which this worker is to look now.

        The first of those in contact looks for the others, also for the absent ones.
        The others look for it, and for the first member, which may have started since.
        """
        now = time.monotonic()
        decides = self.expired and self.is_majority()
        if now < self._next_look and not decides:
            return []
        self._next_look = now + len(self.members) / _LOOKS_PER_SECOND
        seen = self._lines.seen
        others = [each for each in self.members if each != self._me]
        first = min([self._me, *(each for each in others if each in seen)])
        if first != self._me:
            return [each for each in dict.fromkeys((self.members[0], first))]
        if decides:
            others = self.absent()
        begin = self._turn if self._turn < len(others) else 0
        self._turn = begin + _MOST_LOOKS
        return others[begin : self._turn]

    def counted(self, member: Member, contact: Contact) -> Contact | None:
        """Return what a look for a member proves; None if it proves nothing yet."""
        if contact in (Contact.ALIVE, Contact.EXCLUDES):
            self._silent.pop(member, None)
            return contact
        if member not in self._lines.seen:
            # It may not have started, unless the time is over.
            silent = self.expired and self.is_majority()
            return Contact.SILENT if silent else None
        if contact is Contact.DEAD:
            return contact
        # The machine is busy while all import TensorFlow.
        since = self._silent.setdefault(member, time.monotonic())
        return contact if time.monotonic() - since >= self._silence else None

    def absent(self) -> list[Member]:
        """Return the members that this worker hasn't been in contact with."""
        seen = self._lines.seen | {self._me}
        return [member for member in self.members if member not in seen]

    def is_majority(self) -> bool:
        """Return whether more than half of the members have been in contact."""
        return 2 * len(self.absent()) < len(self.members)

    def error(
        self, addresses: Mapping[int, str], reason: StopReason
    ) -> errors.StartupError:
        """Return the error that names the members that can't be reached.

        Args:
            addresses: Each task's address.
            reason: Why the job doesn't start without them.
        """
        others = [each for each in self.members if each != self._me]
        absent = self.absent()

        def why(member: Member) -> str | None:
            found = why_unreachable(addresses[member.id], _PROBE_SECONDS)
            if found is None and member in absent:
                return "it listens there, but doesn't answer"
            return found

        with ThreadPoolExecutor(_MOST_LOOKS, "kerasdist-probe") as pool:
            reasons = dict(zip(others, pool.map(why, others), strict=True))
        missing = {member.id: text for member, text in reasons.items() if text}
        workers = [addresses[member.id] for member in self.members]
        if absent and self.expired:
            return missing_error(missing, workers, self._seconds, ())
        lines = [f"\n  rank {n} ({addresses[n]}): {why}" for n, why in missing.items()]
        return errors.StartupError(
            f"{len(missing)} of {len(workers)} workers were lost before all had "
            f"connected, and {reason.value}:{''.join(lines)}\nLook at the output of "
            "the lost workers, then start the job again.",
            missing,
        )
