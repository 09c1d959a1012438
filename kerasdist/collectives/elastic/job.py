"""An elastic job: its present group, the agreement on the next one, and the change."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from kerasdist import errors
from kerasdist.collectives.elastic.agreement import MembershipService
from kerasdist.collectives.elastic.communicator import (
    ElasticCommunicator,
    MembershipChange,
    differences,
)
from kerasdist.collectives.elastic.epochs import (
    Decision,
    Member,
    StopReason,
    first_decision,
)
from kerasdist.collectives.elastic.groups import (
    BROKEN,
    CannotConnect,
    Connector,
    Group,
    catch_up,
    introduce,
)
from kerasdist.collectives.elastic.peer_messenger import PeerMessenger, Startup
from kerasdist.collectives.elastic.termination import Leaving, Termination
from kerasdist.transport import log
from kerasdist.transport.base import Peer
from kerasdist.transport.deadline import Cancellation, daemon
from kerasdist.transport.liveness.announcements import WaitOutcome
from kerasdist.transport.liveness.launcher_pipe import Reporter
from kerasdist.transport.rendezvous.listener import Listener

# The announcements of the present chief, which the others wait for.
#
# Each group has announcements of its own. If the chief is lost, those that wait for it
# wait for the next group: one of them is the chief there, and has to act itself.


class ElasticChiefActions:
    """The chief's actions, as its `Announcements` make them known.

    Args:
        group: Returns the present group; or, given an epoch, waits for a later one.
        seconds: See `Announcements`.
    """

    def __init__(self, group: Callable[..., Group], seconds: float) -> None:
        self.seconds = seconds
        self._group = group
        # The epochs in which this worker has begun actions, by topic.
        self._begun: dict[str, int] = {}

    @property
    def announces(self) -> bool:
        """See `Announcements.announces`."""
        return self._group().communicator.rank == 0

    def begin(self, topic: str) -> None:
        """See `Announcements.begin`."""
        group = self._group()
        self._begun[topic] = group.epoch
        if group.job.announcements is not None:
            group.job.announcements.begin(topic)

    def end(self, topic: str, facts: dict[str, Any], *, failed: bool = False) -> None:
        """See `Announcements.end`."""
        group = self._group()
        begun = self._begun.pop(topic, None)
        if group.job.announcements is None:
            return
        if begun != group.epoch:
            # Those that wait in the new group don't know of it yet.
            group.job.announcements.begin(topic)
        group.job.announcements.end(topic, facts, failed=failed)

    def wait(self, topic: str, *, own: bool = False) -> WaitOutcome:
        """See `Announcements.wait`; "mine": this worker has become the chief.

        Raises:
            CollectiveError: The job can't continue.
        """
        group = self._group()
        while True:
            announcements = group.job.announcements
            if announcements is None or announcements.announces:
                return WaitOutcome(kind="mine")
            try:
                return announcements.wait(topic, own=own)
            except BROKEN:
                group = self._group(group.epoch)


# Seconds for connecting the members of a new epoch, which all live.
CONNECT_SECONDS = 15.0
# Seconds after the start's time-out until the agreement has ended the connecting.
_GRACE_SECONDS = 10.0
# Times the heartbeat's time-out: without an agreement for so long this worker stops.
_AGREE_FACTOR = 6.0
# Seconds that a change may take, with members that are lost meanwhile.
_CHANGE_SECONDS = 180.0

# Seconds until a thread that connects a group has noticed that it must end.
_CLOSE_SECONDS = 2.0


class ElasticJob:
    """The workers of a strategy, which continue without those that are lost.

    Made by `connect.connect_elastic`. It implements `agreement.Follower`.

    Attributes:
        cluster: The cluster with this worker's rank at the start.
        communicator: Between the present members.
        announcements: The present chief's announcements.
        transport: The transport of the first group, see `connect`.
        excluded: Whether the others have started without this worker.
        timeouts: The timeouts as given.
        leaving: The members that leave the job.
        has_servers: Whether parameter servers connect the workers.
    """

    def __init__(
        self,
        connector: Connector,
        listener: Listener,
        lines: PeerMessenger,
        min_workers: int,
        hosts: tuple[Member, ...],
        startup: Startup | None,
        grace: float,
    ) -> None:
        group = connector.alone()
        first = None if startup is None else first_decision(startup.members)
        self.cluster = connector.cluster
        self.transport = group.job.transport
        self.timeouts = connector.timeouts
        self._lines = lines
        self.has_servers = connector.link is not None
        self._connector = connector
        self._listener = listener
        self._lock = threading.Lock()
        self._group = group
        self._startup = startup
        self._decision: Decision | None = first
        # Ends the connecting of the present epoch's members, when their group isn't
        # needed any more.
        self._connecting = Cancellation()
        self._thread: threading.Thread | None = None
        self._fault: Exception | None = None
        self._refusal: StopReason | None = None
        self.excluded = False
        self._began = 0.0
        # The losses since the last change of the members.
        self._lost_worker: errors.WorkerLost | None = None
        self._lost_server: errors.ServerLost | None = None
        self._closed = False
        peers = {
            member_id: Peer(member_id, address)
            for member_id, address in connector.addresses.items()
        }
        self.communicator = ElasticCommunicator(group, peers, _CHANGE_SECONDS, hosts)
        self._grace = grace
        self.leaving = Leaving(
            self.communicator, None, min_workers, lambda: self._agreement.close()
        )
        self.communicator.wants_to_leave = lambda: self.leaving.wanted
        self.announcements = ElasticChiefActions(
            self.communicator.await_group, self.timeouts.collective
        )
        self._agreement = MembershipService(
            first,
            lines,
            min_workers,
            _AGREE_FACTOR * self.timeouts.heartbeat,
            self.timeouts.heartbeat,
            self,
            startup,
        )
        self.communicator.membership = self._agreement
        self.communicator.lines = lines
        self._reporter = Reporter(connector.session, connector.me.id)

    def begin(self) -> None:
        """Connect the first group; a worker that is to join has none yet.

        Raises:
            StartupError, WorkerLost: Too few workers have connected.
            KerasDistError: They can't work together, as `connect` raises it.
        """
        if self._startup is not None:
            self._begin(self._startup)
        # Before, SIGTERM ends this process at once.
        self.leaving.termination = Termination.acquire(self._grace)

    def _begin(self, startup: Startup) -> None:
        with self._lock:
            if self._decision is not None and not self._decision.epoch.number:
                self._connect(self._decision, self._connecting)
        seconds = self.timeouts.startup + _AGREE_FACTOR * self.timeouts.heartbeat
        try:
            self.communicator.begin(seconds + _CHANGE_SECONDS)
        except errors.CollectiveError:
            if self._refusal is not None:
                addresses = self._connector.addresses
                raise startup.error(addresses, self._refusal) from None
            if self._fault is not None:
                raise self._fault from None
            raise
        self._startup = None
        self.transport = self._group.job.transport

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that all members know, and that a process gets which joins."""
        return self._lines.facts

    @property
    def name(self) -> str:
        """The name of the job in this script, whatever the workers."""
        return self._connector.session.partition(".")[2]

    @property
    def membership(self) -> ElasticCommunicator:
        """The changes of the workers, see `_keras.protocols.ElasticHooks`."""
        return self.communicator

    @property
    def replicas(self) -> tuple[int, ...]:
        """Each present worker's number of replicas, by rank."""
        return self.communicator.replicas

    # What the agreement calls, see `agreement.Follower`.

    def suspend(self) -> None:
        """See `agreement.Follower.suspend`."""
        self._began = self._began or time.monotonic()
        with self._lock:
            self._end_connecting()
            self.communicator.suspend()

    def _end_connecting(self) -> None:
        self._connecting.set()
        self._listener.pending.interrupt()

    def install(self, decision: Decision) -> None:
        """See `agreement.Follower.install`: connects in a thread of its own.

        A member may be lost while it runs. Then the agreement decides the next epoch,
        and this one's group, if there will be one, isn't used.
        """
        with self._lock:
            self._end_connecting()
            self._decision = decision
            self._connecting = Cancellation()
            self._connect(decision, self._connecting)

    def _connect(self, decision: Decision, connecting: Cancellation) -> None:
        self._thread = daemon(
            "kerasdist-change", self._change, decision, connecting, time.time()
        )
        self._thread.start()

    def stop(self, reason: StopReason, missing: tuple[int, ...]) -> None:
        """See `agreement.Follower.stop`."""
        if self._startup is not None:
            self.excluded = reason is StopReason.EXCLUDED
            if reason in (StopReason.NO_QUORUM, StopReason.TOO_FEW):
                self._refusal = reason
        self.communicator.stop(self._final_error(reason, missing))

    def _final_error(
        self, reason: StopReason, missing: tuple[int, ...]
    ) -> errors.WorkerLost:
        """Return the error with which this worker's part in the job ends.

        Args:
            reason: Why it ends.
            missing: The ids of members that are out of contact.
        """
        lost, number, text = self._lost_worker, self._connector.me.id, reason.value
        if missing:
            text += f". Out of contact: ranks {list(missing)}"
        if self.communicator.joining:
            text = "the job that it was to join has ended"
        elif lost is not None:
            reasons = f"{lost.reason}, and {text}"
            return errors.WorkerLost(lost.rank, lost.host, lost.step, reasons)
        elif reason is StopReason.TOO_FEW and self.leaving.ids:
            number = min(self.leaving.ids)
            text = f"it was preempted, and {reason.value}"
        address, step = self._connector.addresses[number], self.communicator.step
        return errors.WorkerLost(number, address, step, text)

    # The change of groups.

    def watch(self, epoch: int, error: errors.CollectiveError) -> None:
        """Follow the failure of an epoch's group, from that group's threads."""
        group = self._group
        if group.epoch != epoch:
            return
        member = group.member(error)
        if isinstance(error, errors.WorkerLost) and member is not None:
            # By the rank that the worker had at the start.
            self._lost_worker = errors.WorkerLost(
                member.id, error.host, self.communicator.step, error.reason
            )
        elif isinstance(error, errors.ServerLost):
            self._lost_server = error
        self._agreement.lost(epoch, member)

    def _change(
        self, decision: Decision, connecting: Cancellation, agreed: float
    ) -> None:
        number = decision.epoch.number
        seconds = CONNECT_SECONDS
        if not number:
            # The agreement ends it before, when the time-out of the start is over.
            seconds = self.timeouts.startup + _GRACE_SECONDS
        timeouts = dataclasses.replace(self.timeouts, startup=seconds)
        group: Group | None = None
        try:
            group = self._connector.group(
                decision,
                timeouts,
                lambda error: self.watch(number, error),
                connecting,
            )
            introduce(group, decision, self._lines)
            fetched = catch_up(group, decision, self.communicator.last)
        except CannotConnect as end:
            if not connecting.is_set():
                self.communicator.stop(end.error)
            return
        except Exception as error:
            if group is not None:
                group.job.close()
            if not connecting.is_set():
                self._failed(decision, error)
            return
        self._agreement.formed(number)
        with self._lock:
            old = self._group
            present = not connecting.is_set()
            if present:
                self._group = group
        if present and fetched is not None:
            present = self._agreement.fetched(
                *(number, fetched.number), lambda: self.communicator.keep(fetched)
            )
        if not present:
            group.job.close()
            return
        failure = group.job.failure
        if failure is not None:
            # It came before `watch` could know the group.
            self.watch(number, failure)
        pause = time.monotonic() - self._began if self._began else 0.0
        self._began = 0.0
        startup = self._startup
        if startup is None:
            change = self._describe(old, group, pause, agreed)
            self.communicator.changes.append(change)
            text = change.text
        else:
            text = self._describe_start(startup.members, group) if number else ""
            pause = 0.0
        with self._lock:
            # Else the next change has begun.
            if not connecting.is_set():
                self.communicator.resume(group, decision.verdict.progress)
        self._tell(group, pause)
        if text and group.communicator.rank == 0:
            log.log_in_background(logging.WARNING, "kerasdist: %s", text)
        old.job.close()

    def _failed(self, decision: Decision, error: Exception) -> None:
        """Report why the group of an epoch couldn't be formed."""
        member = None
        members = decision.epoch.members
        if not decision.epoch.number and _is_final(error):
            self._fault = error
            self.communicator.stop(errors.TransportClosed("The start has failed."))
            return
        if isinstance(error, errors.WorkerLost) and error.rank < len(members):
            member = members[error.rank]
        elif isinstance(error, errors.StartupError) and error.missing:
            member = members[min(error.missing)]
        elif not isinstance(error, errors.KerasDistError):
            log.log_in_background(
                logging.ERROR,
                "kerasdist: connecting the workers of epoch %d failed: %r",
                *(decision.epoch.number, error),
            )
        self._agreement.lost(decision.epoch.number, member)

    def _tell(self, group: Group, pause: float) -> None:
        """Report the members to the launcher."""
        ranks = [member.id for member in group.members]
        step = self.communicator.step
        self._reporter.members(group.epoch, ranks, step + 1, pause)

    def _describe(
        self, old: Group, group: Group, pause: float, agreed: float
    ) -> MembershipChange:
        error = self._lost_worker or self._lost_server
        self._lost_worker = self._lost_server = None
        left = [each for each in old.members if each.id in self.leaving.ids]
        servers = old.job.servers, group.job.servers
        what = differences(old.members, group.members, self._name_of, left, servers)
        lost = set(old.members) - {*group.members, *left}
        reason = "" if error is None or (left and not lost) else f": {error.reason}"
        count = len(group.members)
        verb = "s continue" if count > 1 else " continues"
        return MembershipChange(
            text=f"{what} at step {self.communicator.step}{reason}. "
            f"{count} worker{verb} ({pause:.2f} s).",
            before=len(old.members),
            workers=count,
            seconds=pause,
            agreed=agreed,
            connected=time.time(),
        )

    def _describe_start(self, expected: tuple[Member, ...], group: Group) -> str:
        what = differences(expected, group.members, self._name_of)
        count = len(group.members)
        verb = "s start" if count > 1 else " starts"
        return f"{what} before all workers had connected. {count} worker{verb}."

    def _name_of(self, member: Member) -> str:
        return f"rank {member.id} ({self._connector.addresses[member.id]})"

    def close(self, error: BaseException | None = None) -> None:
        """Leave the job. Can be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._end_connecting()
            group, thread = self._group, self._thread
        if self.leaving.termination is not None:
            self.leaving.termination.release()
        if self._connector.link is not None:
            self._connector.link.leave(group.job, error)
        self.communicator.close()
        self._agreement.close()
        group.job.close(error)
        if thread is not None:
            thread.join(_CLOSE_SECONDS)
        self._listener.release()


def _is_final(error: Exception) -> bool:
    """Return whether the start can't succeed with other members either."""
    lost = (errors.WorkerLost, errors.TransportClosed, errors.CollectiveTimeout)
    final = (errors.KerasDistError, ValueError, TypeError)
    return isinstance(error, final) and not isinstance(error, lost)
