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

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from kerasdist import errors
from kerasdist.collectives.elastic.membership.lines import (
    Answer,
    Contact,
    Left,
    PeerMessenger,
)
from kerasdist.errors import AuthenticationError, ProtocolError
from kerasdist.transport.deadline import Deadline, Timeouts
from kerasdist.transport.membership.events import Member, StopReason
from kerasdist.transport.rendezvous.probe import why_unreachable
from kerasdist.transport.rendezvous.startup import missing_error

# The survey of a job's tasks: which processes answer, and which are members.
#
#     answers     its process lives; it names the members of its epoch, if it has one
#     left        its process lives, and isn't in the job any more
#     absent      nothing listens at its address, or a process that isn't of this job
#     unclear     anything else: its process may be slow, or frozen for a moment
#
# An unclear task may be a member. A process that took all members for absent tasks
# would wait for the start of a job that runs already. So the unclear ones are asked
# again, and those that have left: they may be about to join.

# Tasks that are asked at once; the others are asked only if none of these answers.
_MOST_QUESTIONS = 16
# Times that a task is asked.
_MOST_TIMES = 3
# Seconds until those that have left are asked again.
_AGAIN_SECONDS = 0.5


@dataclasses.dataclass
class Survey:
    """The state of the other tasks; absent ones aren't named.

    Attributes:
        answers: The answers.
        left: The tasks that have left.
        unclear: The unclear ones.
    """

    answers: list[Answer] = dataclasses.field(default_factory=list)
    left: list[int] = dataclasses.field(default_factory=list)
    unclear: list[int] = dataclasses.field(default_factory=list)

    @property
    def shows_a_job(self) -> bool:
        """Whether the job runs already."""
        return any(each.shows_a_job for each in self.answers)


def discover_members(
    lines: PeerMessenger, *, members: bool = False, deadline: Deadline | None = None
) -> Survey:
    """Ask the other tasks, a few at a time, until some answer.

    The unclear ones are asked again until an answer shows that the job runs, but three
    times at most.

    Args:
        lines: This process's lines.
        members: Whether only those count that are members of an epoch.
        deadline: When to give up.
    """
    found = _ask(lines, lines.others, members, deadline)
    for _ in range(_MOST_TIMES - 1):
        again = sorted({*found.unclear, *found.left})
        late = deadline is not None and deadline.expired
        if not again or found.shows_a_job or late:
            break
        if not found.unclear:
            time.sleep(_AGAIN_SECONDS)
        more = _ask(lines, again, members, deadline)
        found = Survey(found.answers + more.answers, more.left, more.unclear)
    return found


def _ask(
    lines: PeerMessenger,
    numbers: Sequence[int],
    members: bool,
    deadline: Deadline | None,
) -> Survey:
    """Ask some tasks once."""
    found = Survey()

    def ask(number: int) -> Answer | None:
        try:
            return lines.ask(number, deadline)
        except Left:
            found.left.append(number)
        except (ConnectionRefusedError, AuthenticationError, ProtocolError):
            pass
        except (OSError, EOFError):
            found.unclear.append(number)
        return None

    with ThreadPoolExecutor(_MOST_QUESTIONS, "kerasdist-survey") as pool:
        for begin in range(0, len(numbers), _MOST_QUESTIONS):
            some = numbers[begin : begin + _MOST_QUESTIONS]
            answers = [each for each in pool.map(ask, some) if each is not None]
            found.answers += [each for each in answers if each.members or not members]
            if found.answers:
                break
    return found


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
        lines: PeerMessenger,
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
