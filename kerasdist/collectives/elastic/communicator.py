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


# The epoch of a worker that isn't a member yet.
NO_EPOCH = -1

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
        is_fixed: See below; then there's no membership.

    Attributes:
        membership: The agreement; set before the first collective, unless `is_fixed`.
        lines: The facts for processes that want to join; set likewise.
        is_fixed: Whether there is one worker, and never another.
        epoch: The number of the present membership, which grows with each change.
        changes: The changes of the members so far, as this worker has seen them;
            appended to by the thread that makes them, so the last one may be new.
        finished_before: The number of collectives that had been finished when it began.
        joining: Whether this worker is alone until it calls `join`.
        is_newcomer: Whether this worker has no state of the job yet: from `join` on,
            until `finish_joining`.
        wants_to_leave: Returns whether this worker wants to leave the job.
        replicas: Each member's number of replicas, by rank.
    """

    membership: MembershipService
    lines: PeerMessenger

    def __init__(
        self,
        group: Group,
        peers: dict[int, Peer],
        patience: float,
        hosts: tuple[Member, ...] = (),
        *,
        is_fixed: bool = False,
    ) -> None:
        self.is_fixed = is_fixed
        self._names = peers
        self._hosts = hosts
        self.joining = bool(hosts)
        self.is_newcomer = False
        # The tasks of members without the job's state.
        self._stateless: set[int] = set()
        self.wants_to_leave: Callable[[], bool] = lambda: False
        # One collective at a time.
        self._calls = threading.Lock()
        # The group on which collectives run, of the thread that changes groups; others
        # wait for it. None while the members change.
        self._changed = threading.Condition()
        self._group: Group | None = group
        self._fetched: Result | None = None
        self._stopped: errors.CollectiveError | None = None
        self._patience = patience
        self.last: Result | None = None
        self._number = self.finished_before = 0
        self.changes: list[MembershipChange] = []
        self._section: int | None = None
        self._ended = False
        self._step = group.communicator.step
        self._inner: Communicator | None = None
        self.replicas: tuple[int, ...] = ()
        self._adopt(group)

    # For what follows the agreement, from any thread.

    def suspend(self) -> None:
        """End the running collective; begin none until `resume`."""
        with self._changed:
            group, self._group = self._group, None
            self._changed.notify_all()
        if group is not None:
            group.job.abandon()

    def keep(self, fetched: Result) -> None:
        """Keep the result of the collective that ended unfinished here.

        Others have finished it. The next group may change again before it is used.
        """
        with self._changed:
            self._fetched = fetched

    def resume(self, group: Group, number: int) -> None:
        """Continue with a new group, unless `stop` was called.

        Args:
            group: The group.
            number: The number of the last collective that a member has finished.
        """
        with self._changed:
            if self._stopped is None:
                self._group = group
                if self.joining:  # before another thread gets the group
                    self._number = number
            self._changed.notify_all()

    def stop(self, error: errors.CollectiveError) -> None:
        """End all collectives, now and later, with an error."""
        with self._changed:
            self._stopped = self._stopped or error
            group, self._group = self._group, None
            self._changed.notify_all()
        if group is not None:
            group.job.abandon(error)

    def begin(self, seconds: float) -> None:
        """Wait for the first group of the job, in its start.

        Raises:
            CollectiveError: There is none within `seconds`, or there will be none.
        """
        self._adopt(self.await_group(after=NO_EPOCH, seconds=seconds))

    # Sections.

    @contextlib.contextmanager
    def section(self) -> Iterator[None]:
        """Let a change of membership end the block's collectives with an error.

        The collectives that all have finished keep their results; from the next one on,
        all members are in the same block, and each collective in it raises. Sections
        inside of others belong to those.
        """
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
        """Return whether a change of membership caused the error of a section.

        Then the new membership holds on return, and the section is to be repeated.

        Raises:
            WorkerLost: The job can't continue.
        """
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
        if self.is_fixed:
            return False, self.wants_to_leave()
        flags = np.array([self.membership.waiting, self.wants_to_leave()], np.int64)
        joining, leaving = self.all_reduce([flags], "max")[0]
        return bool(joining), bool(leaving)

    def publish(self, name: str, value: Any) -> None:
        """Give a fact, as JSON, to processes that ask; all members have the same."""
        if self.is_fixed:
            return
        # Another thread may be reading the facts.
        self.lines.facts = {**self.lines.facts, name: value}

    def facts_of_members(self) -> dict[str, Any] | None:
        """Return a member's facts by their names; None if no member answers."""
        answers = discover_members(self.lines, members=True).answers
        return dict(answers[0].facts) if answers else None

    @contextlib.contextmanager
    def expecting(self, replicas: Sequence[int]) -> Iterator[None]:
        """Act in the block as the member after those with these numbers of replicas.

        For what depends on the layout of the replicas, and calls no collective.
        """
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
        epoch, deadline = self.epoch, time.monotonic() + _ADMIT_SECONDS

        def pending() -> bool:
            # In the collective in which the change came, this was found before it: a
            # member may still admit others, whose change would come later.
            admits = self.epoch == epoch and time.monotonic() < deadline
            return self.membership.admit(admits) or admits

        self.await_changes(pending)
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
        self.await_changes(lambda: self.membership.admit(False))
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

    def await_changes(self, pending: Callable[[], bool | None]) -> None:
        """Wait until no member knows of a change that is still to come.

        There are collectives meanwhile, as a change is planned for after one of them;
        newcomers take part from the first one of their epoch on.

        Args:
            pending: Returns whether one is, as this member knows; None: it waits no
                longer itself, and the others will notice its loss.
        """
        while (mine := pending()) is not None:
            if not self.all_reduce([np.array([mine], np.int64)], "max")[0][0]:
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
            with self._changed:
                is_present = self._group is group
            if is_present:
                self.membership.lost(group.epoch, group.member(error))
            return None
        return result if self.membership.finished(group.epoch, number) else None

    def _await_fetched(self, group: Group, number: int) -> list[Array] | None:
        """Wait for the next group; return the result if others have finished it."""
        self.await_group(after=group.epoch)
        with self._changed:
            fetched, self._fetched = self._fetched, None
        return fetched.arrays if fetched and fetched.number == number else None

    def await_group(
        self, after: int = NO_EPOCH - 1, seconds: float | None = None
    ) -> Group:
        """Wait until there is a group of an epoch after `after`; return it.

        Raises:
            CollectiveError: There will be none, also because none was agreed on within
                `seconds`, by default the patience with a change.
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

    def _adopt(self, group: Group) -> None:
        """Take over rank, size and peers of a group."""
        inner = group.communicator
        if inner is self._inner:
            return
        inner.step = self._step
        self._inner = inner
        self._update_recorder()
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
        with self._changed:
            return self._stopped

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

    def _record(self, recorder: Recorder | None) -> None:
        if self._inner is not None:
            self._inner._record(recorder)
