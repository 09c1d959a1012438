"""`transport="native"`: workers connected by TensorFlow's own collectives.

    1. The workers come together as for "tcp": secret, supervisor, a ring.
    2. Each starts TensorFlow's gRPC server, and all tell theirs of each other
       (`kerasdist.strategies.native.server`).
    3. From then on data goes through TensorFlow: gradients straight from graphs
       (`kerasdist.strategies.native.graph_ops`), numpy arrays as below.

The ring stays: it checks that all ranks are in the same collective before numpy
arrays are given to TensorFlow, which would wait for ever or crash otherwise.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf, errors
from kerasdist.collectives import Communicator
from kerasdist.collectives.failures import copy_to_raise, explain
from kerasdist.collectives.fused_buffer import FusedBuffer
from kerasdist.collectives.ops import Array, itemsize, octets, reducer
from kerasdist.strategies.native.deadlines import CollectiveDeadlines
from kerasdist.strategies.native.server import is_serving, serve
from kerasdist.transport.base import Aborted, PeerClosed, PeerSilent
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.liveness.failure_protocol import Supervisor
from kerasdist.transport.tracing import Recorder, now
from kerasdist.transport.wire.framing import Call

__all__ = ["NativeCommunicator", "connector", "group_options"]

_LOG = logging.getLogger("kerasdist")
_MERGE = {"sum": "Add", "prod": "Mul", "min": "Min", "max": "Max"}
# What TensorFlow doesn't reduce is reduced in a wider dtype and cut off again, which
# wraps as the narrow one does.
_WIDER = {
    "bool": "int32",
    "int8": "int32",
    "int16": "int32",
    "uint8": "int32",
    "uint16": "int32",
    "uint32": "int64",
}
_COLLECTIVE = re.compile(r"Collective ops is aborted|Collective(Reduce|Gather|Bcast)")
_TASK = re.compile(r"remote target /job:worker/replica:0/task:(\d+)")
# What TensorFlow says when another worker is the reason.
_GONE = (
    tf.errors.UnavailableError,
    tf.errors.CancelledError,
    tf.errors.AbortedError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
)


def connector(in_use: bool) -> Callable[[Communicator, Supervisor], Communicator]:
    """Return what makes a `NativeCommunicator` of a ring, for `connect`.

    Args:
        in_use: Whether the user's script has used TensorFlow already.
    """

    def build(ring: Communicator, supervisor: Supervisor) -> Communicator:
        if in_use and not is_serving():
            _LOG.warning(
                "kerasdist: TensorFlow was used before transport='native' was set up. "
                "It renames its devices now: variables, datasets and functions that "
                "were made before can't be used any more. Create the strategy first."
            )
        return NativeCommunicator(ring, supervisor, serve(ring))

    return build


def group_options(key: int, size: int, device: str) -> dict[str, Any]:
    """Arguments that all of TensorFlow's collective operations have.

    Args:
        key: The group's.
        size: Number of its devices.
        device: One of them: all are of one kind.
    """
    return {
        "group_size": size,
        "group_key": key,
        "communication_hint": "nccl" if ":GPU:" in device else "ring",
        # See `kerasdist.strategies.native.deadlines`.
        "timeout_seconds": 0,
    }


class NativeCommunicator(Communicator):
    """Collectives of numpy arrays, done by TensorFlow.

    On CPUs they go round a ring by gRPC. That is how it was tested: there were no
    GPUs, and NCCL, which is used on them, hasn't been run.

    The job's secret doesn't protect TensorFlow's server, also if the job's addresses
    are loopback ones: whoever reaches its port can read and write this process's memory
    and the user's files, and so run anything. Use it only on machines and a network, or
    behind a firewall, that strangers can't reach; `KERASDIST_ALLOW_OPEN_SERVERS=1` says
    that it's so.

    Once TensorFlow's collectives were ended in the midst of one (a lost worker, a
    time-out), this process can't use them any more: start it again.

    Args:
        ring: Connects the same ranks; used for checks. Closed with this one.
        supervisor: Whom to ask about other ranks.
        group: The first of the job's group keys.

    Attributes:
        group: Key of the workers' hosts.
        replica_group: Key of all replicas' devices.
    """

    def __init__(self, ring: Communicator, supervisor: Supervisor, group: int) -> None:
        super().__init__(ring.rank, ring.peers, supervisor, ring.timeout)
        self.group, self.replica_group = group, group + 1
        self._ring = ring
        # Places of ranks are compared by this number: it doesn't start again.
        self._sequence = ring._sequence
        self._host = _tf.host_of("/device:CPU:0")
        self._options = group_options(self.group, self.size, self._host)
        self._watch = CollectiveDeadlines(
            f"kerasdist-native rank {self.rank}", self._late
        )
        # Of collectives that are recorded: when they began.
        self._began: dict[int, tuple[int, Call]] = {}

    # For operations in graphs.

    def begin(self, kind: str, op: str, dtype: str, elements: int, detail: int) -> int:
        """A collective of a graph begins: its number, which is its instance key.

        Args:
            kind: One of `framing.KINDS`.
            op: One of `framing.OPS`.
            dtype: Its name.
            elements: Number of elements, 0 if unknown.
            detail: A checksum of the shapes.
        """
        with self._lock:
            if self._failure is not None:
                raise copy_to_raise(self._failure)
            if self._closed:
                raise errors.TransportClosed(
                    f"This communicator is closed. Received: a call of {kind}. Create "
                    "a new strategy to go on."
                )
            self._sequence += 1
            call = Call(self._sequence, kind, op, dtype, elements, detail)
            self._supervisor.call = call
            self._watch.begin(call, Deadline(self.timeout))
            if self._recorder is not None:
                self._began[call.sequence] = now(), call
            return call.sequence

    def end(self, sequence: int) -> None:
        """It is done."""
        self._watch.end(sequence)
        began = self._began.pop(sequence, None) if self._began else None
        recorder = self._recorder
        if began is not None and recorder is not None:
            begin, call = began
            size = call.elements * itemsize(call.dtype)
            recorder.add(call.kind, begin, now(), size, str(call))

    def translate(self, error: BaseException) -> errors.CollectiveError | None:
        """The job's failure for what TensorFlow raised; None if it's no matter of it.

        Waits, if need be, until it's agreed what the failure is.
        """
        if self._failure is None and not _COLLECTIVE.search(str(error)):
            return None
        call, here = self._supervisor.call, self.peers[self.rank]
        seen = self._seen(error)
        failure = explain(seen, call, here, "", self._supervisor, self._failure)
        if failure is not None and self._failure is None:
            self.abort(failure)
        return self._failure

    # The collectives.

    def _reduce(
        self, source: FusedBuffer, lend: bool, call: Call, deadline: Deadline
    ) -> Array:
        elements, dtype, op = source.elements, source.dtype, call.op
        flat = np.empty(elements, dtype)
        source.copy_to(flat, 0, elements)
        if dtype.kind == "c" and op != "sum":
            # Products of parts aren't parts of products.
            rows = np.empty((self.size, elements), dtype)
            rows[self.rank] = flat
            self._gather([octets(row) for row in rows], call, deadline)
            whole: Array = reducer(op).reduce(rows, axis=0)
            return whole
        # The sign bit the other way round: the order of uint64 is that of int64.
        flip = np.uint64(1 << 63) if dtype == np.uint64 and op in ("min", "max") else 0
        carrier: Array
        if dtype.kind == "c":
            carrier = flat.view(flat.real.dtype)
        elif dtype == np.uint64:
            carrier = (flat ^ np.uint64(flip)).view(np.int64)
        else:
            carrier = flat.astype(_WIDER.get(dtype.name, dtype), copy=False)

        def reduce(key: Any) -> Any:
            return tf.raw_ops.CollectiveReduceV2(
                input=tf.convert_to_tensor(carrier),
                instance_key=key,
                ordering_token=[],
                merge_op=_MERGE[op],
                final_op="Id",
                **self._options,
            )

        result = self._run(reduce, elements, call, deadline)
        if result is None:
            return flat
        if dtype.kind == "c":
            return result.view(dtype)
        if dtype == np.uint64:
            return result.view(np.uint64) ^ np.uint64(flip)
        return result.astype(dtype, copy=False)

    def _gather(self, views: list[memoryview], call: Call, deadline: Deadline) -> None:
        longest = max(len(view) for view in views)
        mine = _padded(views[self.rank], longest)

        def gather(key: Any) -> Any:
            return tf.raw_ops.CollectiveGatherV2(
                input=tf.convert_to_tensor(mine),
                instance_key=key,
                ordering_token=[],
                **self._options,
            )

        result = self._run(gather, longest, call, deadline)
        if result is not None:
            every = result.view(np.uint8).reshape(self.size, -1)
            for rank, view in enumerate(views):
                if rank != self.rank:
                    view[:] = every[rank, : len(view)].data

    def _broadcast(
        self, view: memoryview, root: int, call: Call, deadline: Deadline
    ) -> None:
        padded = _padded(view, len(view))

        def give(key: Any) -> Any:
            if self.rank == root:
                return tf.raw_ops.CollectiveBcastSendV2(
                    input=tf.convert_to_tensor(padded),
                    instance_key=key,
                    **self._options,
                )
            return tf.raw_ops.CollectiveBcastRecvV2(
                T=tf.int32,
                shape=padded.shape,
                instance_key=key,
                **self._options,
            )

        result = self._run(give, len(view), call, deadline)
        if result is not None and self.rank != root:
            view[:] = result.view(np.uint8)[: len(view)].data

    def _barrier(self, call: Call, deadline: Deadline) -> None:
        mine = np.ones(1, np.int32)

        def reduce(key: Any) -> Any:
            return tf.raw_ops.CollectiveReduceV2(
                input=tf.convert_to_tensor(mine),
                instance_key=key,
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
                **self._options,
            )

        self._run(reduce, 1, call, deadline)

    def _run(
        self,
        operation: Callable[[Any], Any],
        elements: int,
        call: Call,
        deadline: Deadline,
    ) -> Array | None:
        """Run a collective eagerly; returns what it gives, None if there's nothing.

        Raises what explains why it can't be done, see `collectives.failures`.
        """
        self._ring._barrier(call, deadline)
        if elements == 0:
            return None
        self._watch.begin(call, deadline)
        try:
            # Also if it's called while a graph is made, which it isn't part of.
            with tf.init_scope(), tf.device(self._host):
                key = tf.constant(call.sequence % 2**31, tf.int32)
                return np.array(operation(key).numpy())
        except tf.errors.OpError as error:
            raise self._seen(error) from error
        finally:
            self._watch.end(call.sequence)

    # Failures.

    def _seen(self, error: BaseException) -> BaseException:
        """What TensorFlow's error tells of the other ranks, as transports say it."""
        if self._failure is not None or self._closed:
            return Aborted()
        said = str(error).partition("\n")[0]
        if isinstance(error, _GONE):
            task = _TASK.search(str(error))
            rank = int(task[1]) if task else (self.rank + 1) % self.size
            return PeerClosed(self.peers[rank], f"TensorFlow can't reach it ({said})")
        if isinstance(error, (tf.errors.InvalidArgumentError, tf.errors.InternalError)):
            return errors.CollectiveMismatch(
                "Ranks called different collectives, or the same one on different "
                f"shapes, at step {self.step}. Received: {self.peers[self.rank]}: "
                f"{self._supervisor.call}; TensorFlow says: {said}. All ranks must "
                "call the same collectives in the same order on the same shapes: does "
                "the script branch on the rank, or does a model differ?"
            )
        return errors.CollectiveError(
            f"TensorFlow's collective {self._supervisor.call} failed at step "
            f"{self.step}: {said}"
        )

    def _late(self, call: Call) -> None:
        here = self.peers[self.rank]
        silent = PeerSilent(self.peers[self.rank - 1], "its time is over")
        self.abort(explain(silent, call, here, "", self._supervisor, self._failure))

    def _record(self, recorder: Recorder | None) -> None:
        super()._record(recorder)
        self._began.clear()
        self._ring._record(recorder)

    def _abort(self) -> None:
        self._ring._abort()
        pending = self._watch.stop()
        if pending:
            # Only then: other strategies of this process may go on.
            _tf.abort_collectives(str(self._failure or "the strategy was closed"))

    def _close(self) -> None:
        self._watch.close()
        self._ring._close()


def _padded(view: memoryview, longest: int) -> Array:
    """A copy of the bytes in a dtype that TensorFlow moves, with at least one element.

    TensorFlow crashes when it gathers nothing.
    """
    words = np.zeros(longest // 4 + 1, np.int32)
    words.view(np.uint8)[: len(view)] = view
    return words
