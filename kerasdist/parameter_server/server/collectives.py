"""Collectives of the workers of a job, at one server.

    1. r -> server   its arrays, and the fingerprint of its collective
    2. server        waits until every live worker has joined; compares fingerprints
    3. server        reduces in rank order, once
    4. server -> r   the result, the same bytes for all

A large all-reduce with "sync", the gradients of a step, is reduced by all threads at
once, block by block, straight into the replies:

    3. r's thread    takes the next block that no thread has taken, reduces it into one
                     reply, and copies it into all others while it is in the caches

A reply in shared memory is for one worker; those that are sent through a socket share
one.

A worker that is waiting in a collective is excluded from every table's staleness bound.
A worker that joins later doesn't take part in earlier collectives; the arrays of a lost
worker aren't counted in a collective that isn't finished.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kerasdist import errors
from kerasdist.collectives.communicator import mismatch
from kerasdist.collectives.fused_buffer import BufferPool
from kerasdist.collectives.row_exchange import Array, reduce_in_order
from kerasdist.parameter_server.membership import Membership, WorkerRecord
from kerasdist.parameter_server.served_table import Place
from kerasdist.parameter_server.tables import ServedTables
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.framing import Call

# The admission of late-joining workers at epoch boundaries.
#
#     j: a new process with a lost worker's rank    v: the others    s: server 0
#
#     1. j -> s   registers; the others don't wait for it yet (`WorkerRecord.joining`)
#     2. j -> s   the number of its `fit`; waits
#     3. v -> s   a barrier between two epochs, with facts of v's training
#     4. s -> j   the facts, and the barrier's number
#        s -> v   the ranks that joined: they are waited for from the next collective on
#
# The other servers wait for a joiner from its first collective on.

# Seconds that a joiner's request waits at the server before it is sent again.
_WAIT_SECONDS = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """The point at which a worker joined.

    Attributes:
        met: Number of the last collective before.
        ranks: All live workers, this one among them.
        facts: The others' facts.
    """

    met: int
    ranks: tuple[int, ...]
    facts: dict[str, Any]


class JoinBarrier:
    """Admits joining workers at one server. All under `Membership.changed`.

    Args:
        membership: The workers.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        # The waiting workers with the number of their `fit`; the replies to those that
        # were admitted.
        self._waiting: dict[int, tuple[WorkerRecord, int]] = {}
        self._entered: dict[str, Entry] = {}
        self._fit = 0
        self._last: tuple[int, list[int]] = (0, [])

    def enter(self, worker: WorkerRecord, fit: int, deadline: Deadline) -> Entry | None:
        """Wait for the next join barrier, in the request of a joiner.

        Args:
            worker: The joiner.
            fit: Number of the `fit` that it is in, from 1.
            deadline: Of the request.

        Returns:
            The barrier at which it has joined; None: it has to wait longer.

        Raises:
            CollectiveError: It can't join any more; the job's failure.
        """
        members = self._membership
        with members.changed:
            if not worker.joining and worker.incarnation not in self._entered:
                raise errors.CollectiveError(
                    f"This server was restarted while {worker} was joining. Start this "
                    "worker again."
                )
            self._waiting[worker.rank] = worker, fit
            members.changed.wait_for(
                lambda: not worker.joining or self._why_not(worker, fit),
                min(_WAIT_SECONDS, deadline.remaining()),
            )
            if self._waiting.get(worker.rank, (None,))[0] is worker:
                del self._waiting[worker.rank]
            members.check()
            if not worker.joining:
                return self._entered.pop(worker.incarnation)
            why = self._why_not(worker, fit)
        if why:
            raise errors.CollectiveError(why)
        return None

    def admit(self, number: int, ranks: list[int], facts: Mapping[str, Any]) -> None:
        """Admit the waiting workers, when the others have reached the barrier.

        Args:
            number: Number of this collective.
            ranks: The ranks that take part; those that join are added.
            facts: The others' facts; "fit" is the number of their `fit`.
        """
        fit = facts.get("fit")
        self._fit = fit if isinstance(fit, int) else self._fit
        joined = [
            worker
            for worker, theirs in self._waiting.values()
            if theirs == self._fit and self._membership.is_here(worker)
        ]
        names = [worker.rank for worker in joined]
        ranks[:] = sorted([*ranks, *names])
        self._last = number, names
        for worker in joined:
            worker.joining = False
            del self._waiting[worker.rank]
            self._entered[worker.incarnation] = Entry(number, tuple(ranks), dict(facts))

    def joined_at(self, number: int) -> list[int]:
        """Return the ranks that joined at this barrier, if it was the last one."""
        return self._last[1] if self._last[0] == number else []

    def _why_not(self, worker: WorkerRecord, fit: int) -> str:
        members = self._membership
        if members.failure is not None or not members.is_here(worker):
            return f"{worker} was lost."
        if not any(not each.joining for each in members.live()):
            return (
                f"{worker} is too late to join: all others have finished or are lost."
            )
        if self._fit > fit:
            return (
                f"{worker} is too late to join: it is in `fit` number {fit} of its "
                f"script, the others are in number {self._fit}. A worker can join in "
                "the same `fit` only."
            )
        return ""


# Smaller buffers are reduced by one thread.
_LEAST_TOGETHER_BYTES = 256 << 10
_BLOCK_BYTES = 256 << 10


class _Round:
    """One collective: the arrays of the workers that have joined, and its result."""

    def __init__(self, first: WorkerRecord, call: Call, use: int) -> None:
        self.first = first
        self.call = call
        self.use = use
        self.brought: dict[int, Sequence[Array]] = {}
        self.rooms: dict[int, Array] = {}
        self.common: Array | None = None
        self.blocks = itertools.count()
        self.done = 0
        self.busy = False
        self.facts: Mapping[str, Any] | None = None
        self.result: list[Array] | None = None
        self.ranks: list[int] = []


class ServerCollectives:
    """The collectives at one server. Safe for threads.

    Args:
        membership: The workers.
        tables: The tables, in whose clocks waiting workers are parked.
        coordinates: Whether this server's results count: with "async" only those of
            server 0; the others only park waiting workers.

    Attributes:
        number: Number of the last finished collective.
        join_barrier: Admits joining workers.
    """

    def __init__(
        self, membership: Membership, tables: ServedTables, *, coordinates: bool
    ) -> None:
        self.number = 0
        self.join_barrier = JoinBarrier(membership)
        self._membership = membership
        self._tables = tables
        self._coordinates = coordinates
        self._round: _Round | None = None
        self._last: _Round | None = None
        self._buffers = BufferPool()

    def join_round(
        self,
        worker: WorkerRecord,
        call: Call,
        arrays: Sequence[Array],
        place: Place | None,
        deadline: Deadline,
        facts: Mapping[str, Any] | None = None,
        use: int = 1,
    ) -> tuple[list[Array], list[int]]:
        """Take part in a collective.

        Args:
            worker: The worker.
            call: The fingerprint of its collective.
            arrays: One flat array, or none.
            place: Makes arrays in this worker's reply; None if it may share another
                worker's.
            deadline: When to give up.
            facts: The values for workers that join here, if this is a join barrier.
            use: Number of the strategy of the worker that calls it.

        Returns:
            The result, not to be changed, and the ranks that took part. Of
            "all_gather" one array per rank of these; else one array, or none.

        Raises:
            CollectiveError: The job's failure.
        """
        members = self._membership
        # A result that is never requested again isn't kept.
        together = (
            self._tables.mode == "sync"
            and call.kind == "all_reduce"
            and len(arrays) == 1
            and arrays[0].nbytes >= _LEAST_TOGETHER_BYTES
        )
        room: list[Array] = []
        if together and place is not None:
            room = place([(str(arrays[0].dtype.name), arrays[0].shape)])
        with members.changed:
            if not self._coordinates:
                # A worker that joined at server 0 is waited for here from now on. Its
                # request may arrive before the others' earlier calls are finished.
                if worker.joining:
                    members.changed.wait_for(
                        lambda: members.failure or self.number >= call.sequence - 1,
                        deadline.remaining(),
                    )
                worker.joining = False
                if call.sequence <= self.number:
                    return [], []
            round = self._enter(worker, call, use)
            round.facts = facts
            if round.result is not None:
                return round.result, round.ranks
            round.brought[worker.rank] = arrays
            if room:
                round.rooms[worker.rank] = room[0]
            self._tables.park(worker.rank)
            members.changed.notify_all()
            while round.result is None:
                members.check(worker)
                if round.busy and together:
                    break
                if not round.busy and self._complete(round):
                    # From now on no worker can be lost from this round.
                    round.ranks = sorted(round.brought)
                    round.busy = True
                    if together and len(round.rooms) < len(round.ranks):
                        round.common = self._buffers.empty(
                            arrays[0].size, arrays[0].dtype
                        )
                    members.changed.notify_all()
                    break
                if deadline.expired:
                    raise members.fail(self._late(round, deadline))
                members.changed.wait(deadline.remaining())
            if round.result is not None:
                return round.result, round.ranks
        if together:
            _reduce_blocks(round)
            with members.changed:
                round.done += 1
                if round.done == len(round.ranks):
                    self._finish(round, [])
                while round.result is None:
                    members.check()
                    if deadline.expired:
                        raise members.fail(self._late(round, deadline))
                    members.changed.wait(deadline.remaining())
            if not room and round.common is not None:
                room = [round.common]
            return room, round.ranks
        result = self._combine(round)
        with members.changed:
            self._finish(round, result)
        return result, round.ranks

    def _finish(self, round: _Round, result: list[Array]) -> None:
        members, call = self._membership, round.call
        with members.changed:
            round.result = result
            if round.facts is not None and self._coordinates:
                self.join_barrier.admit(call.sequence, round.ranks, round.facts)
            if self._tables.mode == "async":
                # With "sync" all workers join all rounds; each piece of a large buffer
                # is a round of its own with the same number.
                for rank in round.ranks:
                    worker = members.workers[rank]
                    worker.met = max(worker.met, call.sequence)
            self._tables.align(round.ranks)
            self.number = max(self.number, call.sequence)
            round.brought = {}
            round.rooms = {}
            # Only with "async" can a request be repeated.
            self._last = None if self._tables.mode == "sync" else round
            self._round = None
            members.changed.notify_all()

    def forget(self, rank: int) -> None:
        """Drop the arrays of a lost worker. Under `changed`."""
        if self._round is not None and not self._round.busy:
            self._round.brought.pop(rank, None)
            if not self._round.brought:
                self._round = None

    def _enter(self, worker: WorkerRecord, call: Call, use: int) -> _Round:
        members = self._membership
        members.check()
        last = self._last
        if last is not None and call == last.call and worker.rank in last.ranks:
            # A repeated request: the reply was lost.
            return last
        if self._round is None:
            self._round = _Round(worker, call, use)
        elif self._round.call != call:
            first, mine = self._round.first, str(self._round.call)
            raise members.fail(mismatch(worker.clock, first, mine, worker, str(call)))
        return self._round

    def _complete(self, round: _Round) -> bool:
        number = round.call.sequence
        for worker in self._membership.live():
            if worker.rank in round.brought or worker.joining:
                continue
            if worker.left >= round.use:
                continue
            if worker.met < number:
                return False
            if worker.returned and self._coordinates:
                raise self._membership.fail(
                    errors.CollectiveError(
                        f"This server was restarted while {round.call} was being "
                        f"finished: {worker} has its result, the others can't get it "
                        "any more. Start the job again; the servers go on from their "
                        "snapshots."
                    )
                )
        # Left in good order while others still need it: as bad as lost, if all are
        # needed in each step.
        gone = [
            p
            for p in self._membership.workers
            if p.state == "finished" or p.left >= round.use
        ]
        if gone and self._tables.mode == "sync":
            raise self._membership.fail(
                gone[0].lost("it closed its strategy while others still needed it")
            )
        return True

    def _late(self, round: _Round, deadline: Deadline) -> errors.CollectiveTimeout:
        late = [
            worker
            for worker in self._membership.live()
            if worker.rank not in round.brought and not worker.joining
        ]
        names = " and ".join(str(p) for p in late if p.met < round.call.sequence)
        if not names:
            return errors.CollectiveTimeout(
                f"All workers joined {round.call}, but this server didn't finish it "
                f"within {deadline.seconds:g} s; {round.first} joined first. Is its "
                "machine overloaded? Give it more time with `timeout=`, or use more "
                "servers."
            )
        return errors.CollectiveTimeout(
            f"{names} didn't join {round.call} within "
            f"{deadline.seconds:g} s; {round.first} waited. The process is alive: is "
            "it still busy with work of its own (saving, evaluating)? Give it more "
            "time with `timeout=`, or let all ranks do the same."
        )

    def _combine(self, round: _Round) -> list[Array]:
        call = round.call
        brought = [round.brought[rank] for rank in round.ranks]
        if call.kind == "all_gather":
            return [arrays[0].copy() for arrays in brought if arrays]
        if call.kind == "broadcast":
            arrays = round.brought.get(call.root)
            if arrays is None:
                return []
            return [array.copy() for array in arrays]
        if not brought[0] or call.kind == "barrier":
            return []
        inputs = [arrays[0] for arrays in brought]
        out = self._buffers.empty(inputs[0].size, inputs[0].dtype)
        with _no_warnings():
            reduce_in_order(inputs, call.op, out)
        return [out]


def _no_warnings() -> np.errstate:
    # An overflow is infinite, for all: a server doesn't warn of it.
    return np.errstate(all="ignore")


def _reduce_blocks(round: _Round) -> None:
    """Reduce the blocks that no other thread has taken into all replies."""
    inputs = [round.brought[r][0] for r in round.ranks]
    outs = [round.rooms[r] for r in round.ranks if r in round.rooms]
    if round.common is not None:
        outs.append(round.common)
    mine, others = outs[0], outs[1:]
    step = _BLOCK_BYTES // mine.itemsize
    for number in round.blocks:
        block = slice(number * step, (number + 1) * step)
        if block.start >= mine.size:
            return
        with _no_warnings():
            some = [values[block] for values in inputs]
            reduce_in_order(some, round.call.op, mine[block])
        for other in others:
            np.copyto(other[block], mine[block])
