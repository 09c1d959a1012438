"""The contract of communicators.

A communicator is one group of ranks and the collectives between them, on numpy
arrays. One contract test suite runs on all of them.
"""

from __future__ import annotations

import abc
import copy
import gzip
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kerasdist import errors
from kerasdist.collectives.row_exchange import Array, Slices
from kerasdist.transport.base import (
    Aborted,
    CallMismatch,
    Peer,
    PeerClosed,
    PeerSilent,
)
from kerasdist.transport.framing import Call
from kerasdist.transport.liveness.failure_protocol import Supervisor
from kerasdist.transport.tracing import FanOutRecorder, Recorder

# The translation of a transport's errors into the failure that all ranks raise.


def copy_to_raise(failure: errors.CollectiveError) -> errors.CollectiveError:
    """Return a copy to raise.

    A raised exception refers to a traceback, and so to all arrays of the frames that
    it passed through: the one that is kept mustn't, and several threads may raise it.
    """
    return copy.copy(failure)


def explain(
    error: BaseException,
    call: Call,
    here: Peer,
    shapes: str,
    supervisor: Supervisor,
    known: errors.CollectiveError | None,
) -> errors.CollectiveError | None:
    """Turn an error into the job's failure, and report it to the others.

    Args:
        error: The error.
        call: The collective in which it occurred.
        here: This rank.
        shapes: The dtypes and shapes of this rank's buffers.
        supervisor: Knows the state of other ranks, and reports to them.
        known: The error that ended this communicator before, or None.

    Returns:
        The failure; None if the error isn't one of the group.
    """
    step = supervisor.step
    if isinstance(error, Aborted):
        return (
            known
            or supervisor.failure
            or errors.TransportClosed(
                f"This communicator was closed during {call}. Create a new strategy "
                "to continue."
            )
        )
    if isinstance(error, PeerClosed):
        return supervisor.explain(error.peer, f"{error}, while {here} was in {call}")
    if isinstance(error, PeerSilent):
        return supervisor.report(_late(error.peer, call, here, supervisor))
    if isinstance(error, CallMismatch):
        mine, theirs = str(error.mine), str(error.theirs)
        return supervisor.report(mismatch(step, here, mine, error.peer, theirs, shapes))
    if isinstance(error, errors.CollectiveError):
        return supervisor.report(error)
    if isinstance(error, errors.ProtocolError):
        return supervisor.report(
            errors.CollectiveError(f"{here} in {call} at step {step}: {error}")
        )
    if isinstance(error, OSError):
        return supervisor.report(
            errors.CollectiveError(
                f"{here} could not continue {call} at step {step}: {error}."
            )
        )
    return None


def _late(
    peer: Peer, call: Call, here: Peer, supervisor: Supervisor
) -> errors.CollectiveTimeout:
    """Name the late ranks: in a ring, not always the neighbour that was silent."""
    absent = supervisor.absent(call)
    where = f"{here} waited at step {supervisor.step}"
    if absent is not None and not absent:
        return errors.CollectiveTimeout(
            f"All ranks joined {call}, but it wasn't done in time; {where} for "
            f"{peer}. Was one of them late, or is the network too slow for these "
            "buffers? Give it more time with `timeout=`."
        )
    names = " and ".join(str(late) for late in absent or [peer])
    return errors.CollectiveTimeout(
        f"{names} didn't join {call} in time; {where}. The process is alive: is it "
        "still busy with work of its own (saving, evaluating)? Give it more time with "
        "`timeout=`, or let all ranks do the same."
    )


def mismatch(
    step: int, here: object, mine: str, there: object, theirs: str, shapes: str = ""
) -> errors.CollectiveMismatch:
    """Return the error of two ranks in different calls.

    Args:
        step: The step in which that was seen.
        here: One rank.
        mine: Its call.
        there: The other rank.
        theirs: Its call.
        shapes: The shapes of the first one's buffers, if they are known.
    """
    if mine == theirs:
        mine += f" on buffers {shapes}" if shapes else ""
        theirs += " on buffers of other dtypes or shapes"
    return errors.CollectiveMismatch(
        f"Ranks called different collectives at step {step}. "
        f"Received: {here}: {mine}; {there}: {theirs}. All ranks must call the "
        "same collectives in the same order on the same shapes: does the script branch "
        "on the rank, or does a model differ?"
    )


class Communicator(abc.ABC):
    """Collectives between the ranks of one group.

    Every rank of the group must call the same collectives in the same order,
    with arrays of the same shapes and dtypes. Each call carries a fingerprint; a
    difference is a `CollectiveMismatch` on every rank. Calls of several threads
    are executed one after the other.

    Attributes:
        rank: 0..size-1.
        size: Number of ranks.
        ranks: The job's ranks of the group's members, for messages: where a job
            continues without a lost worker the others are renumbered in the group.
        peers: The ranks of the group, with their names in messages.
        step: The optimizer step that messages name; the strategy counts it.
        shares_memory: Whether all ranks read one memory, so that sending is cheap.
        piece_bytes: The size of the pieces in which a ring sends, the same on all
            ranks; 0 where nothing is sent in such pieces.
        within_host: The communicator of this host's ranks, if it has several and other
            hosts have others; else None.
    """

    shares_memory: bool = False
    piece_bytes: int = 0
    within_host: Communicator | None = None
    _recorders: tuple[Recorder, ...] = ()

    rank: int
    size: int
    ranks: tuple[int, ...]
    peers: tuple[Peer, ...]
    step: int

    @abc.abstractmethod
    def all_reduce(
        self,
        buffers: Sequence[npt.ArrayLike],
        op: str = "sum",
        *,
        scale: float | None = None,
        unscaled: int = 0,
        lend: bool = False,
    ) -> list[Array]:
        """Reduce each buffer over all ranks, element by element.

        Args:
            buffers: Arrays of any shape (scalars and empty ones too) and of any
                numeric dtype: ints, floats incl. float16 and bfloat16, complex,
                bool. Shapes and dtypes must be the same on all ranks.
            op: "sum", "prod", "min" or "max". On bool only "max" (or) and "min"
                (and). Sums are computed in the buffer's own dtype; integers wrap.
            scale: A factor by which this rank's buffers, which must be floats then,
                are multiplied while they are packed; the ranks' may differ. With 0
                this rank adds zeros, whatever its buffers hold.
            unscaled: How many of the buffers, the last ones, stay as they are.
            lend: Whether results may be in memory that other ranks read, too, which
                saves copying. They are then read-only. The same on all ranks.

        Returns:
            New arrays, one per buffer, bit-identical on all ranks.

        Raises:
            TypeError, ValueError: An argument is wrong; nothing was sent, and
                the communicator can still be used.
            CollectiveError: See `kerasdist.errors`. The communicator can't be
                used any more, on any rank.
        """

    @abc.abstractmethod
    def all_gather(self, array: npt.ArrayLike) -> list[Array]:
        """Give every rank's array to every rank.

        Args:
            array: An array of any numeric dtype; its first dimension may differ
                between ranks, the others may not. A scalar counts as one row.

        Returns:
            New arrays, one per rank, in rank order.

        Raises:
            TypeError, ValueError, CollectiveError: As `all_reduce`.
        """

    @abc.abstractmethod
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
        """Give every rank's slices to every rank, and reduce small arrays with them.

        Args:
            tables: This rank's slices of each table; their numbers may differ between
                ranks, everything else may not.
            weight: With it slices and `means` are multiplied by `weight / total`. With
                0 this rank adds nothing, whatever its arrays hold. None: they stay as
                they are.
            total: The sum of the weights; None: it's found by the exchange.
            means: Small arrays of floats, whose weighted sums are returned.
            sums: Small arrays, whose sums are returned.
            lend: See `all_reduce`.

        Returns:
            For each table values and indices: those of all ranks, in rank order. If no
            rank has an index twice (see `Slices`) and the table is less to send, its
            sum and all its indices. Then the sums of `means` and `sums`, in new arrays.
            All are bit-identical on all ranks.

        Raises:
            TypeError, ValueError, CollectiveError: As `all_reduce`.
        """

    @abc.abstractmethod
    def broadcast(self, buffers: Sequence[npt.ArrayLike], root: int = 0) -> list[Array]:
        """Give `root`'s buffers to every rank.

        Args:
            buffers: Arrays of any shape and numeric dtype; the same shapes and
                dtypes on all ranks. Only the root's contents count.
            root: The rank whose buffers are given.

        Returns:
            New arrays, one per buffer.

        Raises:
            TypeError, ValueError, CollectiveError: As `all_reduce`.
        """

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has called this.

        Raises:
            CollectiveError: See `kerasdist.errors`.
        """

    @abc.abstractmethod
    def abort(self, error: errors.CollectiveError | None = None) -> None:
        """End every wait of this communicator, now and later, on this rank.

        Args:
            error: The error that the waits raise; by default `TransportClosed`.

        Safe from any thread. The others notice that this rank has left.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Release sockets, threads and memory. Can be called twice.

        A collective in another thread ends with `TransportClosed`.
        """

    def add_recorder(self, recorder: Recorder) -> None:
        """Record spans of collectives, from the next one on.

        Args:
            recorder: See `kerasdist.transport.tracing`. There may be several.
        """
        self._recorders += (recorder,)
        self._update_recorder()

    def remove_recorder(self, recorder: Recorder) -> None:
        """End what `add_recorder` began; no effect if that wasn't called."""
        self._recorders = tuple(
            each for each in self._recorders if each is not recorder
        )
        self._update_recorder()

    def _update_recorder(self) -> None:
        several = self._recorders
        if len(several) > 1:
            self._record(FanOutRecorder(several))
        else:
            self._record(several[0] if several else None)

    @abc.abstractmethod
    def _record(self, recorder: Recorder | None) -> None:
        """Begin or end recording; subclasses pass it on to their parts."""

    @property
    @abc.abstractmethod
    def failure(self) -> errors.CollectiveError | None:
        """The error that ended this communicator, or None."""


def gather_json(
    communicator: Communicator, value: Any, *, compressed: bool = False
) -> list[Any]:
    """Return all workers' values, which are JSON, in rank order.

    Args:
        communicator: The communicator of the workers, which call this together.
        value: This worker's value.
        compressed: Whether they are compressed on the way; the same on all workers.
    """
    text = json.dumps(value).encode()
    if compressed:
        text = gzip.compress(text, 1)
    every = communicator.all_gather(np.frombuffer(text, np.uint8))
    texts = [part.tobytes() for part in every]
    return [json.loads(gzip.decompress(t) if compressed else t) for t in texts]


class ForwardingCommunicator(Communicator):
    """A communicator whose collectives run on another one, which may change."""

    @abc.abstractmethod
    def _run(self, collective: Callable[[Communicator], list[Array]]) -> list[Array]:
        """Run a collective on the present communicator; return its result."""

    def all_reduce(self, *buffers: Any, **options: Any) -> list[Array]:
        """See `Communicator.all_reduce`."""
        return self._run(lambda inner: inner.all_reduce(*buffers, **options))

    def all_gather(self, array: npt.ArrayLike) -> list[Array]:
        """See `Communicator.all_gather`; one array per present rank."""
        return self._run(lambda inner: inner.all_gather(array))

    def exchange_rows(self, *tables: Any, **options: Any) -> list[Array]:
        """See `Communicator.exchange_rows`, between the present ranks."""
        return self._run(lambda inner: inner.exchange_rows(*tables, **options))

    def barrier(self) -> None:
        """See `Communicator.barrier`."""

        def wait(inner: Communicator) -> list[Array]:
            inner.barrier()
            return []

        self._run(wait)
