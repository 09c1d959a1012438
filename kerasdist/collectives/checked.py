"""The parts that all communicators of one group share.

`CheckedCommunicator` checks arguments, packs buffers, numbers the calls, puts a
deadline on each and turns a transport's errors into the errors of the job;
subclasses reduce and move the bytes.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import operator
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kerasdist import errors
from kerasdist.collectives.communicator import Communicator, copy_to_raise, explain
from kerasdist.collectives.fused_buffer import FusedBuffer, aligned
from kerasdist.collectives.row_exchange import (
    Array,
    RowExchange,
    Slices,
    check_dtype,
    check_op,
    check_scale,
    itemsize,
    octets,
)
from kerasdist.transport.base import Collective, Peer
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.framing import Call
from kerasdist.transport.liveness.failure_protocol import Supervisor
from kerasdist.transport.tracing import Recorder, now

# The signature of an all-reduce, the same on all ranks: its dtypes and shapes.
#
# A training loop reduces the same shapes in each step. So the checks, the groups by
# dtype and the checksum of a list of buffers are found once and kept (numpy needs
# several microseconds for the name of a dtype alone).

# Dtypes and shapes of buffers, in messages and in checksums.
Shapes = Sequence[tuple[str, tuple[int, ...]]]
# More different calls than this aren't a training loop's.
MOST_SIGNATURES = 256


def checksum(shapes: Shapes) -> int:
    """Return a checksum of dtypes and shapes that is the same in every process."""
    return zlib.crc32(repr(list(shapes)).encode())


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """The buffers of an all-reduce, checked.

    Attributes:
        shapes: Names of dtypes, and shapes.
        checksum: Their checksum.
        groups: For each dtype, in the order of names: its name, the indices of its
            buffers, and how many of these are scaled, the first ones.
        scaled: The dtypes of those that are.
    """

    shapes: Shapes
    checksum: int
    groups: tuple[tuple[str, tuple[int, ...], int], ...]
    scaled: tuple[np.dtype[Any], ...]


@functools.lru_cache(MOST_SIGNATURES)
def signature_of(
    described: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...],
    op: str,
    unscaled: int,
    lend: bool,
) -> Signature:
    """Return the signature of buffers with these dtypes and shapes.

    Raises:
        TypeError, ValueError: An argument of `all_reduce` is wrong.
    """
    first = len(described) - unscaled
    groups: dict[str, list[int]] = {}
    for index, (dtype, _) in enumerate(described):
        check_op(op, dtype)
        groups.setdefault(check_dtype(dtype), []).append(index)
    check_op(op, np.dtype("float32"))
    # Every group's fingerprint has the shapes of all: a difference is noticed at once
    # and not a group later.
    shapes = [(dtype.name, shape) for dtype, shape in described]
    if lend:
        shapes.append(("lent", ()))
    return Signature(
        tuple(shapes),
        checksum(shapes),
        tuple(
            (name, tuple(groups[name]), sum(i < first for i in groups[name]))
            for name in sorted(groups)
        )
        or (("none", (), 0),),
        tuple({dtype: None for dtype, _ in described[:first]}),
    )


# Seconds that `close` waits for a collective of another thread that it ended.
_CLOSE_SECONDS = 10.0
_MOST_SHOWN = 500  # characters of shapes in a message


class CheckedCommunicator(Communicator):
    """The base class of communicators that move bytes themselves.

    Args:
        rank: This process's rank in the group.
        peers: The ranks of the group, with their names in messages.
        supervisor: Knows the state of other ranks.
        timeout: Seconds that one collective may take.

    Attributes:
        sequence: Number of the last collective; between two the same on all ranks.
        supervisor: As given.
    """

    def __init__(
        self, rank: int, peers: Sequence[Peer], supervisor: Supervisor, timeout: float
    ) -> None:
        self.rank = rank
        self.size = len(peers)
        self.ranks = tuple(range(self.size))
        self.peers = tuple(peers)
        self.timeout = timeout
        self.supervisor = supervisor
        self._lock = threading.Lock()
        self.sequence = 0
        self._closed = False
        self._shapes: Shapes = ()
        self._failure: errors.CollectiveError | None = None
        self._recorder: Recorder | None = None

    # The collectives.

    def all_reduce(
        self,
        buffers: Sequence[npt.ArrayLike],
        op: str = "sum",
        *,
        scale: float | None = None,
        unscaled: int = 0,
        lend: bool = False,
    ) -> list[Array]:
        """See `Communicator.all_reduce`."""
        arrays = _arrays(buffers)
        described = tuple((array.dtype, array.shape) for array in arrays)
        signature = signature_of(described, op, unscaled, lend)
        if scale is not None:
            for dtype in signature.scaled:
                check_scale(scale, op, dtype)
        results: list[Array] = [np.empty(0)] * len(arrays)
        with self._user_call(signature.shapes, signature.checksum) as detail:
            for name, indices, scaled in signature.groups:
                parts, starts = aligned([arrays[i] for i in indices])
                plain = starts[scaled] if scaled < len(starts) else None
                source = FusedBuffer(parts, scale, plain)
                elements = source.elements
                with (
                    self._calling("all_reduce", op, name, elements, detail) as one,
                    # An overflow is infinite, on all ranks: one of them mustn't warn
                    # of it or, if numpy is set to, raise an error.
                    np.errstate(all="ignore"),
                ):
                    flat = self._reduce(source, lend, one)
                if lend:
                    flat.flags.writeable = False
                for i, start in zip(indices, starts, strict=True):
                    end = start + arrays[i].size
                    results[i] = flat[start:end].reshape(arrays[i].shape)
        return results

    def all_gather(self, array: npt.ArrayLike) -> list[Array]:
        """See `Communicator.all_gather`."""
        mine = np.asarray(array)
        name = check_dtype(mine.dtype)
        shape = mine.shape or (1,)
        mine = np.ascontiguousarray(mine).reshape(shape)
        with self._user_call([(name, shape[1:])]) as detail:
            with self._calling("all_gather", "none", "int64", 1, detail) as one:
                rows = np.zeros(self.size, np.int64)
                rows[self.rank] = shape[0]
                self._gather([octets(rows[r : r + 1]) for r in range(self.size)], one)
            out = [np.empty((int(count), *shape[1:]), mine.dtype) for count in rows]
            out[self.rank][...] = mine
            elements = sum(part.size for part in out)
            with self._calling("all_gather", "none", name, elements, detail) as one:
                self._gather([octets(part) for part in out], one)
        return out

    def exchange_rows(
        self,
        tables: Sequence[Slices],
        weight: int | None = None,
        total: int | None = None,
        *,
        means: Sequence[Array] = (),
        sums: Sequence[Array] = (),
        lend: bool = False,
    ) -> list[Array]:
        """See `Communicator.exchange_rows`."""
        exchange = RowExchange(self.rank, self.size, tables, weight, total, means, sums)
        for name, _ in exchange.shapes:
            check_dtype(np.dtype(name))
        # Results would differ between ranks that don't agree in these.
        modes = (weight is None, total is None, len(means), lend)
        shapes = [*exchange.shapes, ("modes", tuple(int(mode) for mode in modes))]
        headers = np.zeros((self.size, exchange.header_bytes), np.uint8)
        with self._user_call(shapes) as detail, np.errstate(all="ignore"):
            size = headers.size
            with self._calling("all_gather", "none", "uint8", size, detail) as one:
                note = self._free_memories() if lend else 0
                exchange.write_header(headers[self.rank], note)
                self._gather([octets(header) for header in headers], one)
                small = exchange.read(headers)
            size = exchange.result_bytes
            if size:
                with self._calling("all_gather", "none", "uint8", size, detail) as one:
                    gathered = self._gather_rows(exchange, size, lend, one)
            else:
                gathered = exchange.join(exchange.buffers())
            whole = []
            for place in exchange.whole:
                source = FusedBuffer([exchange.table(place)])
                name, elements = source.dtype.name, source.elements
                with self._calling("all_reduce", "sum", name, elements, detail) as one:
                    whole.append(self._reduce(source, lend, one))
        return [*exchange.results(gathered, whole), *small]

    def _gather_rows(
        self,
        exchange: RowExchange,
        size: int,
        lend: bool,
        collective: Collective,
    ) -> list[Array]:
        memory = None
        if lend:
            memory = self._take(size, exchange.notes, collective)
        if memory is None:
            buffers = exchange.buffers()
            self._gather([octets(buffer) for buffer in buffers], collective)
            return exchange.join(buffers)
        gathered = exchange.write(memory)
        self._barrier(collective)
        for array in gathered:
            array.flags.writeable = False
        return gathered

    def broadcast(self, buffers: Sequence[npt.ArrayLike], root: int = 0) -> list[Array]:
        """See `Communicator.broadcast`."""
        root = operator.index(root)
        if not 0 <= root < self.size:
            raise ValueError(
                f"There is no such rank. Received: root={root}; expected 0 to "
                f"{self.size - 1}."
            )
        arrays = _arrays(buffers)
        shapes = [(check_dtype(array.dtype), array.shape) for array in arrays]
        sizes = [array.nbytes for array in arrays]
        flat = np.empty(sum(sizes), np.uint8)
        parts = np.split(flat, np.cumsum(sizes, dtype=np.int64)[:-1])
        if self.rank == root:
            for array, part in zip(arrays, parts, strict=False):
                part[:] = octets(np.ascontiguousarray(array))
        with (
            self._user_call(shapes) as detail,
            self._calling("broadcast", "none", "uint8", flat.size, detail, root) as one,
        ):
            self._broadcast(octets(flat), root, one)
        return [
            part.copy().view(array.dtype).reshape(array.shape)
            for array, part in zip(arrays, parts, strict=False)
        ]

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        with (
            self._user_call([]) as detail,
            self._calling("barrier", "none", "none", 0, detail) as one,
        ):
            self._barrier(one)

    def prepare(self) -> None:
        """Prepare the first collective; all ranks call it, when they are connected."""

    # The rest of the contract.

    def abort(self, error: errors.CollectiveError | None = None) -> None:
        """See `Communicator.abort`."""
        if self._failure is None:
            self._failure = error or errors.TransportClosed(
                "This communicator was aborted. Create a new strategy to continue."
            )
        self._abort()

    def close(self) -> None:
        """See `Communicator.close`."""
        self._closed = True
        self._abort()
        # Not while another thread uses them. If that takes too long (or this is a
        # signal handler during a collective), that thread's call closes them.
        if self._lock.acquire(timeout=_CLOSE_SECONDS):
            try:
                self._close()
            finally:
                self._lock.release()

    @property
    def failure(self) -> errors.CollectiveError | None:
        """See `Communicator.failure`."""
        return self._failure

    @property
    def step(self) -> int:
        """See `Communicator.step`."""
        return self.supervisor.step

    @step.setter
    def step(self, value: int) -> None:
        self.supervisor.step = value

    # The inner contract: for subclasses, and for communicators that are made of others,
    # which call it on these. All arrays are flat and C-contiguous.

    def _record(self, recorder: Recorder | None) -> None:
        self._recorder = recorder

    @abc.abstractmethod
    def _reduce(self, source: FusedBuffer, lend: bool, collective: Collective) -> Array:
        """Return a new array: the source's elements, reduced over all ranks.

        The operation is that of the call. If `lend`, other ranks may read the array's
        memory, too.
        """

    @abc.abstractmethod
    def _gather(self, views: list[memoryview], collective: Collective) -> None:
        """Fill all views but this rank's own, which is sent to the others."""

    def _free_memories(self) -> int:
        """Return a number that all ranks get before `_take`."""
        return 0

    def _take(
        self, size: int, notes: Sequence[int], collective: Collective
    ) -> Array | None:
        """Return aligned memory of bytes that all ranks share; None: there is none.

        Args:
            size: In bytes.
            notes: All ranks' results of `_free_memories`, in this collective.
            collective: The collective.
        """
        return None

    @abc.abstractmethod
    def _broadcast(self, view: memoryview, root: int, collective: Collective) -> None:
        """Fill the view with the root's, except at the root."""

    @abc.abstractmethod
    def _barrier(self, collective: Collective) -> None:
        """Return when all ranks have called it."""

    @abc.abstractmethod
    def _abort(self) -> None:
        """End every wait with `Aborted`."""

    @abc.abstractmethod
    def _close(self) -> None:
        """Release sockets, memory and the like."""

    # Numbering, deadlines and errors.

    @contextlib.contextmanager
    def _user_call(self, shapes: Shapes, known: int | None = None) -> Iterator[int]:
        """Hold the lock during one call of a user, which may be several collectives.

        Args:
            shapes: Dtypes and shapes of its buffers.
            known: Their checksum, if it's known.

        Yields:
            Their checksum.
        """
        with self._lock:
            try:
                self._shapes = shapes
                yield checksum(shapes) if known is None else known
            finally:
                if self._closed:
                    self._close()

    @contextlib.contextmanager
    def _calling(
        self,
        kind: str,
        op: str,
        dtype: str,
        elements: int,
        detail: int,
        root: int = 0,
    ) -> Iterator[Collective]:
        if self._failure is not None:
            raise copy_to_raise(self._failure)
        if self._closed:
            raise errors.TransportClosed(
                f"This communicator is closed. Received: a call of {kind}. Create a "
                "new strategy to continue."
            )
        self.sequence += 1
        call = Call(self.sequence, kind, op, dtype, elements, detail, root)
        self.supervisor.call = call
        recorder = self._recorder
        begin = 0 if recorder is None else now()
        try:
            yield Collective(call, Deadline(self.timeout))
        except BaseException as error:
            self._give_up(error, call)
            raise
        if recorder is not None:
            recorder.add(kind, begin, now(), elements * itemsize(dtype), call)

    def _give_up(self, error: BaseException, call: Call) -> None:
        """Raise the job's failure for an error; return if it isn't one of the group."""
        here, supervisor = self.peers[self.rank], self.supervisor
        shapes = ", ".join(f"{name}{shape}" for name, shape in self._shapes)
        shapes = shapes[:_MOST_SHOWN]
        failure = explain(error, call, here, shapes, supervisor, self._failure)
        if failure is None:
            # Not an error of the group (Ctrl-C, a bug): this rank is out of step all
            # the same; the report spares the others the wait for it.
            self.abort()
            reason = f"it left {call} with {type(error).__name__}: {error}"
            reason = reason.rstrip(". \n")
            lost = errors.WorkerLost(here.rank, here.address, supervisor.step, reason)
            supervisor.report(lost, wait=False)
            return
        if self._failure is None:
            self._failure = failure
        self._abort()
        raise copy_to_raise(self._failure) from error


def _arrays(buffers: Sequence[npt.ArrayLike]) -> list[Array]:
    if isinstance(buffers, np.ndarray):
        raise TypeError(
            "A collective takes a list of arrays. Received: one array of shape "
            f"{buffers.shape}. Put it into a list."
        )
    return [np.asarray(buffer) for buffer in buffers]


class SingleCommunicator(CheckedCommunicator):
    """Collectives of one rank: every result is a copy of the argument."""

    def __init__(self, address: str = "this worker") -> None:
        super().__init__(0, [Peer(0, address)], Supervisor(), 1.0)

    def _reduce(self, source: FusedBuffer, lend: bool, collective: Collective) -> Array:
        elements, dtype = source.elements, source.dtype
        flat = np.empty(elements, dtype)
        source.copy_to(flat, 0, elements)
        return flat

    def _gather(self, views: list[memoryview], collective: Collective) -> None: ...

    def _broadcast(
        self, view: memoryview, root: int, collective: Collective
    ) -> None: ...

    def _barrier(self, collective: Collective) -> None: ...

    def _abort(self) -> None: ...

    def _close(self) -> None: ...
