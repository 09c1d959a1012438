"""The lines between members, on which they agree while their group is broken.

A line is a connection to a member's listener, made when the first message is sent on it
and kept; each direction has its own. It carries one frame per message. Messages may be
lost: those for a member that can't be reached at once are dropped, and the agreement
sends others later. One thread watches all lines.

A question is a connection of its own, answered at once by any process that has lines
for the job: by it a process that starts finds out whether the job runs already.

Each process has a name of its own, which its hellos and answers carry. By it another
one notices that a task was started again with the same member's id and incarnation:
the first process with these counts as that member, and is dead then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from kerasdist import errors
from kerasdist.collectives.elastic.epochs import (
    Member,
    Message,
    StopReason,
    decode,
    encode,
)
from kerasdist.errors import AuthenticationError, ProtocolError
from kerasdist.transport import log
from kerasdist.transport.base import Connection
from kerasdist.transport.deadline import Cancellation, Deadline, Timeouts, in_daemon
from kerasdist.transport.framing import (
    FrameType,
    read_record,
    to_json,
    to_object,
    unexpected,
)
from kerasdist.transport.liveness.heartbeat import Frame, Heartbeat
from kerasdist.transport.rendezvous.dial import dial_address
from kerasdist.transport.rendezvous.listener import Listener
from kerasdist.transport.rendezvous.startup import missing_error
from kerasdist.transport.rendezvous.waiting_notice import why_unreachable

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


# The start of an elastic job, in which some of its workers may be lost already.
#
# Tasks start at different moments, minutes apart on a cluster. So a task at whose
# address nothing listens may not have started yet. During the start a member's absence
# counts only in these cases:
#
#     it was in contact before           as later: it is dead if nothing listens
#                                        there any more, and silent if it doesn't answer
#     the launcher reports that its      it is dead
#     process has ended for good
#     the start's time-out is over       it is silent: a refused connection proves
#                                        nothing, as it may be a firewall's
#
# A process that was started again after a loss doesn't know of the job. If its network
# is cut, it must not begin the job from the start while the others train. Therefore
# more than half of the members must have been in contact when the time-out counts:
# exactly half with the chief aren't enough, as they are later.
#
# More than half may have been started again, too: the rest continues if it has proof
# that they are dead. So absent members are looked for until the end, and a last look,
# which takes a few seconds, decides. By its answer a member of a job that runs excludes
# those that start. Only if it gives none from the survey until that look, there are two
# jobs.


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


_PURPOSE = "membership"
# Seconds until a message counts as lost, and a member as out of contact. A handshake
# takes milliseconds, and a busy machine may take a second for one.
_SECONDS = 3.0
_POLL_SECONDS = 0.5
# Seconds between two questions to a process that ends.
_ENDING_SECONDS = 0.05
# Seconds that the last messages may take.
_LAST_SECONDS = 1.0
# Lines have no heartbeats: one that is silent isn't lost.
_SILENT = Timeouts(heartbeat=1e9, collective=1e9)


class Contact(enum.Enum):
    """The state of a member, by the answer of its address."""

    ALIVE = "its process answers"
    DEAD = "nothing listens at its address any more, or it has left the job"
    SILENT = "it doesn't answer"
    EXCLUDES = "its process answers, and this one isn't a member of its epoch"


class Left(ConnectionRefusedError):
    """The answer of a process that lives, and has left the job."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer of a process to a question.

    Attributes:
        member: The process.
        members: Those of its epoch; none if the process is only starting.
        facts: The facts that a process gets which joins.
        process: The process's own name.
        replaces: Whether it knows another process as the member that has asked.
        seconds: How long it waits for the start, see `PeerMessenger.patience`.
    """

    member: Member
    members: tuple[Member, ...]
    facts: dict[str, Any]
    process: str
    replaces: bool
    seconds: float | None

    @property
    def shows_a_job(self) -> bool:
        """Whether the job runs already."""
        return bool(self.members) or self.replaces


class PeerMessenger:
    """The lines of one member to and from all others.

    Args:
        me: This member.
        addresses: Each task's address, by the member's id.
        secret: The job's secret.
        listener: This process's; not owned.
        session: The name of the job, the same on all members.

    Attributes:
        me: As given.
        receive: Called with each message that arrives, from a thread of this object;
            None: it's lost.
        replaced: Called with each member whose task has a new process; or None.
        members: The members of this process's epoch, for answers.
        facts: See `Answer`.
        patience: Until when this process waits for the others of the start: the
            earliest of those of all that it is in contact with. None: it doesn't wait.
    """

    def __init__(
        self,
        me: Member,
        addresses: Mapping[int, str],
        secret: bytes,
        listener: Listener,
        session: str,
    ) -> None:
        self.me = me
        self._addresses = dict(addresses)
        self._secret = secret
        self._listener = listener
        self._session = session
        self.receive: Callable[[Member, Message], None] | None = None
        self.replaced: Callable[[Member], None] | None = None
        self.members: tuple[Member, ...] = ()
        self.patience: Deadline | None = None
        self._process = secrets.token_hex(8)
        # The processes of members, by their first contact.
        self._known: dict[Member, str] = {}
        self.facts: dict[str, Any] = {}
        self._stop = Cancellation()
        self._closing = False
        self._lock = threading.Lock()
        # The lines to members, by member and None; and those from them, by member and
        # number.
        self._lines = Heartbeat(
            "kerasdist-lines", _SILENT, self._on_frame, lambda key, reason: None
        )
        self._arrivals = itertools.count()
        # The lines that are being made, and what is to be sent on them.
        self._dials: dict[Member, Future[None]] = {}
        self._queued: dict[Member, list[bytes]] = {}
        # The last message: it may be for all members.
        self._encoded: tuple[Message | None, bytes] = None, b""
        listener.enter(session)
        self._taking = in_daemon("kerasdist-lines taken", self._take)

    def send(self, to: Member, message: Message) -> None:
        """Send a message, which may be lost. Doesn't wait."""
        with self._lock:
            if self._closing:
                return  # nobody would end the thread of a new line
            if self._encoded[0] is not message:
                self._encoded = message, encode(message)
            payload = self._encoded[1]
            if to in self._queued:
                self._queued[to].append(payload)
            elif self._lines.last_received((to, None)) is not None:
                self._lines.post((to, None), FrameType.MEMBERSHIP, payload)
            else:
                self._queued[to] = [payload]
                name = f"kerasdist-line to {to.id}"
                self._dials[to] = in_daemon(name, self._begin_line, to)

    def contact(self, member: Member) -> Contact:
        """Find out whether a member's process lives; takes a few seconds at most."""
        ending = Deadline(_SECONDS)
        while True:
            try:
                answer = self.ask(member.id)
            except ConnectionRefusedError:
                return Contact.DEAD
            except (ConnectionError, EOFError):
                # A process that is killed listens until its memory has been freed.
                if ending.expired or self._stop.wait(_ENDING_SECONDS):
                    return Contact.SILENT
            except (OSError, AuthenticationError, ProtocolError):
                return Contact.SILENT
            else:
                break
        if answer.member > member or not self._is_known(member, answer.process):
            # A process that was started again has the task.
            return Contact.DEAD
        if answer.replaces or (answer.members and self.me not in answer.members):
            return Contact.EXCLUDES
        return Contact.ALIVE

    @property
    def seen(self) -> frozenset[Member]:
        """The members whose processes this one has been in contact with."""
        return frozenset(self._known)

    def _is_known(self, member: Member, process: str) -> bool:
        """Note the process of a member; return False if it had another one."""
        return self._known.setdefault(member, process) == process

    def names(self, members: Iterable[Member]) -> list[list[Any]]:
        """Return the names of processes: this member's, and of those that are known."""
        names = {each: self._known[each] for each in members if each in self._known}
        names[self.me] = self._process
        return [[*member, name] for member, name in names.items()]

    def learn(self, names: Iterable[Sequence[Any]]) -> None:
        """Take over what `names` returns at another member."""
        for number, incarnation, name in names:
            self._known.setdefault(Member(number, incarnation), name)

    def _share_patience(self, seconds: object) -> None:
        patience = self.patience
        if (
            patience is not None
            and isinstance(seconds, (int, float))
            and 0 <= seconds < patience.remaining()
        ):
            self.patience = Deadline(seconds)

    @property
    def others(self) -> tuple[int, ...]:
        """The other tasks."""
        return tuple(each for each in self._addresses if each != self.me.id)

    def ask(self, number: int, deadline: Deadline | None = None) -> Answer:
        """Ask the process of a task; takes a few seconds at most.

        Args:
            number: The task.
            deadline: When to give up, if that is earlier.

        Raises:
            Left: It has left the job.
            ConnectionRefusedError: It has no process.
            OSError, EOFError: It doesn't answer.
            AuthenticationError, ProtocolError: Another process is at its address.
        """
        with self._dial(Member(number), deadline, question=True) as connection:
            kind, payload = connection.read(_limit(deadline))
            if kind is FrameType.REFUSAL:
                raise Left
            if kind is not FrameType.MEMBERSHIP:
                raise unexpected(kind)
            answer = read_record(to_json(payload), Answer, "An answer about membership")
            self._is_known(answer.member, answer.process)
            self._share_patience(answer.seconds)
            return answer

    def _answer(self, connection: Connection, *, replaces: bool) -> None:
        answer = Answer(
            *(self.me, self.members, dict(self.facts), self._process, replaces),
            None if self.patience is None else self.patience.remaining(),
        )
        with connection, contextlib.suppress(OSError):
            limit = Deadline(_POLL_SECONDS)
            connection.write_json(FrameType.MEMBERSHIP, to_object(answer), limit)

    def close(self) -> None:
        """Close all lines, when what waits has been sent. Can be called twice."""
        with self._lock:
            self._closing = True
            dials = list(self._dials.values())
        wait(dials, _LAST_SECONDS)
        self._stop.set()
        self._listener.leave(self._session)
        self._listener.pending.interrupt()
        wait([*dials, self._taking], _SECONDS)
        self._lines.close()

    def _dial(
        self, to: Member, deadline: Deadline | None = None, *, question: bool = False
    ) -> Connection:
        hello = {
            "session": self._session,
            "purpose": _PURPOSE,
            "question": question,
            "rank": self.me.id,
            "incarnation": self.me.incarnation,
            "to": list(to),
            "process": self._process,
            "seconds": None if self.patience is None else self.patience.remaining(),
        }
        address = self._addresses[to.id]
        return dial_address(address, self._secret, hello, _limit(deadline), self._stop)

    def _begin_line(self, to: Member) -> None:
        """Make the line to a member, and send what waits for it; or drop that."""
        connection: Connection | None = None
        try:
            connection = self._dial(to)
        except (OSError, EOFError, AuthenticationError, ProtocolError):
            return
        finally:
            with self._lock:
                queued = self._queued.pop(to)
                if connection is not None:
                    self._lines.add((to, None), connection)
                    for payload in queued:
                        self._lines.post((to, None), FrameType.MEMBERSHIP, payload)

    def _take(self) -> None:
        """Take the lines of others from the listener."""
        while not self._stop.is_set():
            pending = self._listener.pending
            for rank, connection, hello in pending.take_any(
                self._session, _PURPOSE, _POLL_SECONDS, self._stop
            ):
                number = hello.get("incarnation")
                if type(number) is not int or rank not in self._addresses:
                    self._complain(rank, f"Its hello is damaged: {hello!r:.200}.")
                    connection.close()
                    continue
                sender = Member(rank, number)
                replaces = not self._is_known(sender, str(hello.get("process")))
                self._share_patience(hello.get("seconds"))
                if hello.get("question") is True:
                    self._answer(connection, replaces=replaces)
                if replaces and self.replaced is not None:
                    self.replaced(sender)
                if hello.get("question") is True:
                    continue
                if replaces or hello.get("to") != list(self.me):
                    # It is for an earlier process with this task, or from another one
                    # than the member.
                    connection.close()
                    continue
                self._lines.add((sender, next(self._arrivals)), connection)

    def _on_frame(self, key: Any, frame: Frame) -> None:
        """Take a frame, in the thread of all lines."""
        kind, _, payload = frame
        sender, number = key
        try:
            if kind is not FrameType.MEMBERSHIP or number is None:
                raise unexpected(kind)
            message = decode(payload, self._addresses)
        except ProtocolError as error:
            self._complain(sender.id, str(error))
            raise
        if self.receive is not None:
            self.receive(sender, message)

    def _complain(self, rank: int, why: str) -> None:
        """Say why messages of a process aren't heeded: others may exclude it for it."""
        log.log_in_background(
            logging.WARNING,
            "kerasdist: a message about membership from rank %d was ignored. %s The "
            "other members exclude a worker of which they receive none. Do all tasks "
            "run the same version, with the same cluster?",
            rank,
            why,
        )


def _limit(deadline: Deadline | None) -> Deadline:
    """Return the deadline of one step of a line."""
    return Deadline(
        _SECONDS if deadline is None else min(_SECONDS, deadline.remaining())
    )
