"""Collectives that are repeated, or end a section, when the membership changes.

    inside of a section     a change ends the section's next collective, on all members:
                            `MembershipChanged`
    outside                 the collective is repeated by the new members

A collective cannot finish anywhere before all members have begun it, so at a change
some may have finished it, and the others not: these get its result
(`groups.catch_up`). So all members have always finished the same collectives. For that,
a broadcast is a reduction here, because it would finish at its root alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kerasdist import errors
from kerasdist.collectives.communicator import (
    Communicator,
    ForwardingCommunicator,
    copy_to_raise,
)
from kerasdist.collectives.elastic.agreement import MembershipService
from kerasdist.collectives.elastic.epochs import Member
from kerasdist.collectives.elastic.groups import BROKEN, Group, Result
from kerasdist.collectives.elastic.peer_messenger import PeerMessenger, discover_members
from kerasdist.collectives.row_exchange import Array
from kerasdist.transport.base import Peer
from kerasdist.transport.tracing import Recorder

# The changes of an elastic job's members, as this worker has seen them.


@dataclasses.dataclass(frozen=True, kw_only=True)
class MembershipChange:
    """A change of the members.

    Attributes:
        text: A sentence about it.
        before: The number of workers before it.
        workers: The number of workers after it.
        seconds: The time without a group, on this worker.
        agreed: When the members were decided, in seconds of the system's clock.
        connected: When they were connected.
    """

    text: str
    before: int
    workers: int
    seconds: float
    agreed: float
    connected: float

    @property
    def began(self) -> float:
        """The time at which training was suspended."""
        return self.connected - self.seconds


def differences(
    before: Sequence[Member],
    after: Sequence[Member],
    name: Callable[[Member], str],
    preempted: Sequence[Member] = (),
    servers: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> str:
    """Return in words which members were lost, have left, and were added.

    Args:
        before: The members before the change.
        after: Those after it.
        name: Returns the name of a member.
        preempted: Those that leave as they have announced.
        servers: The names of the servers before and after the change.
    """
    missing = [each for each in before if each not in after]
    earlier, later = servers
    lost = [name(each) for each in missing if each not in preempted]
    lost += [server for server in earlier if server not in later]
    added = [name(each) for each in after if each not in before]
    if earlier:  # else this worker was alone, and didn't know the servers
        added += [server for server in later if server not in earlier]
    parts = [
        f"{', '.join(names)} {'were' if len(names) > 1 else 'was'} {verb}"
        for names, verb in (
            (lost, "lost"),
            ([name(e) for e in missing if e in preempted], "preempted, and left"),
            (added, "added"),
        )
        if names
    ]
    return " and ".join(parts) or "connections between the workers were lost"


# The present group of a job, which one thread changes and others wait for.

# The epoch of a worker that isn't a member yet.
NO_EPOCH = -1


class PresentGroup:
    """The group on which collectives run; none while the members change.

    Args:
        group: The first one.
        patience: Seconds that a change of membership may take.
    """

    def __init__(self, group: Group, patience: float) -> None:
        self._patience = patience
        self._changed = threading.Condition()
        # Of the thread that changes groups; None while there is no group.
        self._group: Group | None = group
        self._fetched: Result | None = None
        self._stopped: errors.CollectiveError | None = None

    @property
    def stopped(self) -> errors.CollectiveError | None:
        """The error that ended this worker's part in the job, or None."""
        with self._changed:
            return self._stopped

    def is_usable(self, group: Group) -> bool:
        """Return whether a group is the present one."""
        with self._changed:
            return self._group is group

    def suspend(self) -> None:
        """End the running collective; there is no group until `resume`."""
        with self._changed:
            group, self._group = self._group, None
            self._changed.notify_all()
        if group is not None:
            group.job.abandon()

    def resume(self, group: Group, take_over: Callable[[], None]) -> None:
        """Continue with a new group, unless `stop` was called.

        Args:
            group: The group.
            take_over: Called before another thread gets it.
        """
        with self._changed:
            if self._stopped is None:
                self._group = group
                take_over()
            self._changed.notify_all()

    def stop(self, error: errors.CollectiveError) -> None:
        """End all collectives, now and later, with an error."""
        with self._changed:
            self._stopped = self._stopped or error
            group, self._group = self._group, None
            self._changed.notify_all()
        if group is not None:
            group.job.abandon(error)

    def wait(self, after: int, seconds: float | None = None) -> Group:
        """Wait until there is a group of an epoch after `after`; return it.

        Raises:
            CollectiveError: There will be none.
        """
        seconds = self._patience if seconds is None else seconds
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._stopped is None:
                if self._group is not None and self._group.epoch > after:
                    return self._group
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    self._stopped = errors.CollectiveTimeout(
                        "The workers didn't agree in time on which of them continue. "
                        f"Received: no agreement within {seconds:g} s. Can all "
                        "hosts reach each other? Start the job again."
                    )
                    break
                self._changed.wait(remaining)
            raise copy_to_raise(self._stopped)

    # The result of a collective that others have finished.

    def keep(self, fetched: Result) -> None:
        """Keep the result of the collective that ended unfinished here.

        Others have finished it. The next group may change again before it is used.
        """
        with self._changed:
            self._fetched = fetched

    def take_fetched(self, number: int) -> list[Array] | None:
        """Return the result of a collective if it was kept, and forget it."""
        with self._changed:
            fetched, self._fetched = self._fetched, None
        if fetched is None or fetched.number != number:
            return None
        return fetched.arrays


# Seconds for which members wait for processes that wanted to join.
_ADMIT_SECONDS = 10.0
_POLL_SECONDS = 0.002
# Seconds for which a worker waits until it's a member. It ends before if they do.
_JOIN_SECONDS = 3600.0


class MembershipChanged(Exception):
    """The members have changed during a section."""


class ElasticCommunicator(ForwardingCommunicator):
    """The communicator of the present members of a job.

    Rank, size and peers change in a collective, or when a section begins or is left by
    `has_changed`, never in between.

    Args:
        group: The group of this worker alone, which it has until the first one.
        peers: The workers of the job by the ids of members, with their names.
        patience: Seconds that a change of membership may take.
        hosts: The members that are to admit this worker; none if it is one already.

    Attributes:
        membership: The agreement; set before the first collective.
        lines: The facts for processes that want to join; set likewise.
        is_fixed: See `ElasticHooks.is_fixed`.
        epoch: The number of the present membership.
        changes: The changes of the members; appended to by the thread that makes them.
        finished_before: The number of collectives that had been finished when it began.
        joining: Whether this worker is alone until it calls `join`.
        is_newcomer: Whether this worker has no state of the job yet: from `join` on,
            until `finish_joining`.
        wants_to_leave: Returns whether this worker wants to leave the job.
        replicas: Each member's number of replicas, by rank.
    """

    is_fixed = False
    membership: MembershipService
    lines: PeerMessenger

    def __init__(
        self,
        group: Group,
        peers: dict[int, Peer],
        patience: float,
        hosts: tuple[Member, ...] = (),
    ) -> None:
        self._names = peers
        self._hosts = hosts
        self.joining = bool(hosts)
        self.is_newcomer = False
        # The tasks of members without the job's state.
        self._stateless: set[int] = set()
        self.wants_to_leave: Callable[[], bool] = lambda: False
        # One collective at a time.
        self._calls = threading.Lock()
        self._present = PresentGroup(group, patience)
        self.last: Result | None = None
        self._number = self.finished_before = 0
        self.changes: list[MembershipChange] = []
        self._section: int | None = None
        self._ended = False
        self._recorders: list[Recorder] = []
        self._step = 0
        self._inner: Communicator | None = None
        self.replicas: tuple[int, ...] = ()
        self._adopt(group)

    # For what follows the agreement, from any thread.

    def suspend(self) -> None:
        """End the running collective; begin none until `resume`."""
        self._present.suspend()

    def keep(self, fetched: Result) -> None:
        """See `PresentGroup.keep`."""
        self._present.keep(fetched)

    def resume(self, group: Group, number: int) -> None:
        """Continue with a new group.

        Args:
            group: The group.
            number: The number of the last collective that a member has finished.
        """

        def take_over() -> None:
            if self.joining:
                self._number = number

        self._present.resume(group, take_over)

    def stop(self, error: errors.CollectiveError) -> None:
        """End all collectives, now and later, with an error."""
        self._present.stop(error)

    def begin(self, seconds: float) -> None:
        """Wait for the first group of the job, in its start.

        Raises:
            CollectiveError: There is none within `seconds`, or there will be none.
        """
        self._adopt(self.await_group(after=NO_EPOCH, seconds=seconds))

    # Sections.

    @contextlib.contextmanager
    def section(self) -> Iterator[None]:
        """See `ElasticHooks.section`. Sections inside of others belong to those."""
        if self._section is not None:
            yield
            return
        self._ended = False
        self._adopt(self.await_group())
        self._section = self.epoch
        try:
            yield
        finally:
            self._section = None

    def has_changed(self, error: BaseException) -> bool:
        """See `ElasticHooks.has_changed`."""
        ended, self._ended = self._ended, False
        if not ended and not isinstance(error, MembershipChanged):
            return False
        self._adopt(self.await_group())
        return True

    # Joining.

    def ask(self) -> tuple[bool, bool]:
        """Return whether processes want to join, and whether members want to leave.

        All members call it alike.
        """
        flags = np.array([self.membership.waiting, self.wants_to_leave()], np.int64)
        joining, leaving = self.all_reduce([flags], "max")[0]
        return bool(joining), bool(leaving)

    def publish(self, name: str, value: Any) -> None:
        """See `ElasticHooks.publish`."""
        # Another thread may be reading the facts.
        self.lines.facts = {**self.lines.facts, name: value}

    def facts_of_members(self) -> dict[str, Any] | None:
        """See `ElasticHooks.facts_of_members`."""
        answers = discover_members(self.lines, members=True).answers
        return dict(answers[0].facts) if answers else None

    @contextlib.contextmanager
    def expecting(self, replicas: Sequence[int]) -> Iterator[None]:
        """See `ElasticHooks.expecting`."""
        rank, size, own = self.rank, self.size, self.replicas
        self.rank, self.size = len(replicas), len(replicas) + 1
        self.replicas = (*replicas, own[-1])
        try:
            yield
        finally:
            self.rank, self.size, self.replicas = rank, size, own

    def admit(self) -> bool:
        """Admit the processes that want to join; all members call it alike.

        Returns:
            Whether there are members now without the job's state: newcomers.
        """
        self._await_change(self.epoch, time.monotonic() + _ADMIT_SECONDS)
        return self._agree_on_newcomers()

    def join(self, seconds: float | None = None) -> None:
        """Become a member; returns when `admit` does at the others.

        Args:
            seconds: To wait for that; by default an hour, because members admit no
                worker during an evaluation.

        Raises:
            CollectiveError: The members haven't admitted this worker in time, or it
                can't be a member.
        """
        self.membership.apply(self._hosts)
        self.await_group(after=NO_EPOCH, seconds=seconds or _JOIN_SECONDS)
        self.joining = False
        self.is_newcomer = True
        self._await_change(NO_EPOCH, 0.0)
        self._agree_on_newcomers()

    def finish_joining(self) -> None:
        """End the joining of newcomers; all members call it alike.

        Raises:
            WorkerLost: All members that had the job's state were lost before.
        """
        if self.is_newcomer and all(rank in self._stateless for rank in self.ranks):
            raise errors.WorkerLost(
                *(self.ranks[self.rank], self.peers[self.rank].address, self._step),
                "all workers with the job's state were lost while it joined",
            )
        self.is_newcomer = False

    def _agree_on_newcomers(self) -> bool:
        """Find out which members have no state; return whether there are some.

        By a collective: a change of members may have been made on some of them already,
        and not on the others.
        """
        mine = np.array([self.ranks[self.rank], self.is_newcomer], np.int64)
        found = self.all_gather(mine[np.newaxis])
        self._stateless = {int(rank) for ((rank, flag),) in found if flag}
        return bool(self._stateless)

    def _await_change(self, epoch: int, deadline: float) -> None:
        """Wait for a change after `epoch`, and for all that are planned by then.

        There are collectives meanwhile, as a change is planned for after one of them;
        newcomers take part from the first one of their epoch on.
        """
        while True:
            admits = self.epoch == epoch and time.monotonic() < deadline
            pending = self.membership.admit(admits)
            flags = np.array([admits, pending], np.int64)
            admits, pending = self.all_reduce([flags], "max")[0]
            # In the collective in which the change came, flags were those of before it:
            # a member may still admit others, whose change would come later.
            if not pending and not admits:
                return
            time.sleep(_POLL_SECONDS)

    # Collectives.

    def broadcast(self, buffers: Sequence[npt.ArrayLike], root: int = 0) -> list[Array]:
        """See `Communicator.broadcast`; `root` is a rank of the present members.

        If the root is lost before any member has its buffers, the buffers are those of
        the member that has its rank then, or of the last one.
        """
        arrays = [np.asarray(buffer) for buffer in buffers]

        def give(inner: Communicator) -> list[Array]:
            if inner.size == 1:
                return inner.broadcast(arrays)
            # As bytes: not every dtype can be added up, and -0.0 + 0.0 is 0.0.
            flat = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays]
            if inner.rank != min(root, inner.size - 1):
                flat = [np.zeros_like(each) for each in flat]
            sums = inner.all_reduce(flat)
            return [
                each.view(array.dtype).reshape(array.shape)
                for each, array in zip(sums, arrays, strict=True)
            ]

        return self._run(give)

    def _run(self, collective: Callable[[Communicator], list[Array]]) -> list[Array]:
        """Run a collective on the present group, until its result may be used."""
        with self._calls:
            number = self._number + 1
            while True:
                group = self.await_group()
                if self._section is None:
                    self._adopt(group)
                elif self._section != group.epoch:
                    self._ended = True
                    raise MembershipChanged(
                        "The members of the job have changed in this section."
                    )
                found = self._try(collective, group, number)
                if found is None:
                    found = self._await_fetched(group, number)
                if found is not None:
                    self._number, self.last = number, Result(number, found)
                    return found

    def _try(
        self,
        collective: Callable[[Communicator], list[Array]],
        group: Group,
        number: int,
    ) -> list[Array] | None:
        """Run a collective; return None if it has to be repeated."""
        try:
            result = collective(group.communicator)
        except BROKEN as error:
            if self._present.is_usable(group):
                self.membership.lost(group.epoch, group.member(error))
            return None
        return result if self.membership.finished(group.epoch, number) else None

    def _await_fetched(self, group: Group, number: int) -> list[Array] | None:
        """Wait for the next group; return the result if others have finished it."""
        self.await_group(after=group.epoch)
        return self._present.take_fetched(number)

    def await_group(
        self, after: int = NO_EPOCH - 1, seconds: float | None = None
    ) -> Group:
        """See `PresentGroup.wait`."""
        return self._present.wait(after, seconds)

    def _adopt(self, group: Group) -> None:
        """Take over rank, size and peers of a group."""
        inner = group.communicator
        if inner is self._inner:
            return
        inner.step = self._step
        for recorder in self._recorders:
            inner.add_recorder(recorder)
        self._inner = inner
        self.epoch = group.epoch
        self.finished_before = self._number
        self.rank, self.size = inner.rank, inner.size
        self.shares_memory = inner.shares_memory
        self.ranks = tuple(member.id for member in group.members)
        self.peers = tuple(self._names[rank] for rank in self.ranks)
        self.replicas = group.job.replicas
        if self.joining:
            # It isn't the chief, and must not write files: as if another were.
            self.rank, self.replicas = 1, self.replicas * 2

    @property
    def has_joined(self) -> bool:
        """Whether this process has joined the job after its start."""
        return bool(self._hosts)

    @property
    def finished(self) -> int:
        """The number of collectives that have been finished, in all groups."""
        return self._number

    # The rest of the contract.

    @property
    def step(self) -> int:
        """See `Communicator.step`."""
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._step = value
        if self._inner is not None:
            self._inner.step = value

    @property
    def failure(self) -> errors.CollectiveError | None:
        """The error that ended this worker's part in the job, or None."""
        return self._present.stopped

    def abort(self, error: errors.CollectiveError | None = None) -> None:
        """See `Communicator.abort`."""
        self.stop(
            error
            or errors.TransportClosed(
                "This communicator was aborted. Create a new strategy to continue."
            )
        )

    def close(self) -> None:
        """See `Communicator.close`."""
        self.stop(
            errors.TransportClosed(
                "This communicator is closed. Create a new strategy to continue."
            )
        )

    def add_recorder(self, recorder: Recorder) -> None:
        """See `Communicator.add_recorder`; recording goes on in later groups."""
        self._recorders.append(recorder)
        if self._inner is not None:
            self._inner.add_recorder(recorder)

    def remove_recorder(self, recorder: Recorder) -> None:
        """See `Communicator.remove_recorder`."""
        self._recorders = [each for each in self._recorders if each is not recorder]
        if self._inner is not None:
            self._inner.remove_recorder(recorder)
