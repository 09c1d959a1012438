"""Workers connected by TensorFlow's own collectives (`transport="native"`).

1. The workers meet as for "tcp": secret, failure detector, a ring.
2. Each starts TensorFlow's gRPC server, and adds the others to its cluster
   (`kerasdist.strategies.native_communicator`).
3. From then on TensorFlow adds gradients, directly in graphs
   (`kerasdist.strategies.device_sums`). All else is sent by the ring.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading

import numpy as np
import tensorflow as tf

from kerasdist import errors
from kerasdist._tf import remote
from kerasdist.cluster.address import split_address
from kerasdist.collectives import Communicator, gather_json
from kerasdist.collectives.communicator import copy_to_raise, explain
from kerasdist.collectives.ring import RingCommunicator
from kerasdist.collectives.row_exchange import itemsize
from kerasdist.transport.base import Aborted, PeerClosed, PeerSilent
from kerasdist.transport.deadline import Deadline, daemon
from kerasdist.transport.framing import Call
from kerasdist.transport.liveness.failure_protocol import Supervisor
from kerasdist.transport.rendezvous.bind import narrow, on_free_port, report_unprotected
from kerasdist.transport.sockets import SocketTransport
from kerasdist.transport.tracing import now

# This process's gRPC server, through which TensorFlow's collectives communicate.
#
# TensorFlow can start only one in a process, and never ends it. Each worker starts it
# on a free port of its own; the ring that connects the workers already distributes the
# addresses, and each adds all of them to its TensorFlow cluster.

# Distinct from the keys that TensorFlow's own strategies count up from 1.
_FIRST_GROUP = 0x4B44_0000


class Server:
    """The state of the server, as class attributes: there is one per process."""

    rank: int | None = None
    address = ""
    workers: tuple[str, ...] = ()
    next_group = _FIRST_GROUP


def is_serving() -> bool:
    """Return whether this process has started its server."""
    return Server.rank is not None


def serve(ring: Communicator) -> int:
    """Join a job of TensorFlow's collectives, with all ranks of a ring.

    Args:
        ring: Connects the ranks.

    Returns:
        The key of the group of the job's replicas. No other job of these processes
        gets it.

    Raises:
        ClusterError: On all ranks, if one was a worker of another cluster before.
            The ring can't be used any more.
    """
    remote.reach_directly(split_address(peer.address)[0] for peer in ring.peers)
    host = ring.peers[ring.rank].address.rpartition(":")[0]
    if Server.rank is None:
        _start_server(ring.rank, host)
    given = gather_json(ring, [Server.rank, Server.address, Server.workers])
    workers = tuple(address for _, address, _ in given)
    moved = [str(r) for r, (was, _, _) in enumerate(given) if was != r]
    known = {tuple(before) for _, _, before in given}
    if moved or known not in ({()}, {workers}):
        # A last collective, so that no rank leaves before all have reached this point.
        # The first to leave ends the ring, but ranks interrupted by it know enough.
        with contextlib.suppress(errors.CollectiveError):
            ring.barrier()
        raise errors.ClusterError(
            "A process can be a worker of only one cluster with transport='native': "
            "TensorFlow's server can't be started twice. "
            f"Received: workers={workers}; before: {Server.workers}; ranks that had "
            f"another rank before: {', '.join(moved) or 'none'}. Use another "
            "transport, or start new processes."
        )
    if not Server.workers:
        remote.serve_collectives(ring.rank, dict(enumerate(workers)))
        Server.workers = workers
    (group,) = ring.all_reduce([np.int64(Server.next_group)], "max")
    Server.next_group = int(group) + 1
    return int(group)


def _start_server(rank: int, host: str) -> None:
    """Start the server on a free port."""

    def listen(port: int) -> None:
        remote.serve_collectives(rank, {rank: f"{host}:{port}"})

    port = on_free_port(listen, tf.errors.UnknownError)
    Server.rank, Server.address = rank, f"{host}:{port}"
    narrowed = narrow(Server.address)
    text = report_unprotected(Server.address, narrowed, os.environ)
    _LOG.warning("kerasdist: %s", text)


# Seconds between two looks at the deadlines.
_LOOK_SECONDS = 0.2
# Ending the late collective takes the thread at most about this long.
_JOIN_SECONDS = 10.0
_LOG = logging.getLogger("kerasdist")
_COLLECTIVE = re.compile(r"Collective ops is aborted|Collective(Reduce|Gather|Bcast)")
_TASK = re.compile(r"remote target /job:worker/replica:0/task:(\d+)")
# TensorFlow's messages if another worker is the reason.
_GONE = (
    tf.errors.UnavailableError,
    tf.errors.CancelledError,
    tf.errors.AbortedError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
)


class NativeCommunicator(RingCommunicator):
    """A ring for numpy arrays, which numbers and watches TensorFlow's collectives.

    On CPUs TensorFlow's collectives use a ring over gRPC. That is how they were tested:
    there were no GPUs, and NCCL, which is used on them, hasn't been run.

    The job's secret doesn't protect TensorFlow's server, even if the job's addresses
    are loopback ones: any process that reaches its port can read and write this
    process's memory and the user's files, and so run anything. Use it only on machines
    and a network, or behind a firewall, that untrusted hosts can't reach;
    `KERASDIST_ALLOW_OPEN_SERVERS=1` confirms that.

    Once TensorFlow's collectives were ended during one (a lost worker, a time-out),
    this process can't use them any more: start it again.

    Args:
        transport: See `RingCommunicator`.
        supervisor: Knows the state of other ranks.
        timeout: Seconds that one collective may take.
        in_use: Whether the user's script has used TensorFlow already.

    Attributes:
        group: Key of the group of all replicas' devices.
    """

    def __init__(
        self,
        transport: SocketTransport,
        supervisor: Supervisor,
        timeout: float,
        *,
        in_use: bool,
    ) -> None:
        super().__init__(transport, supervisor, timeout)
        self._in_use = in_use
        # The sums on devices that aren't done, by number: until when each has to be,
        # and when it began, or 0 if it isn't recorded. TensorFlow can put a time-out on
        # each of its collectives, but keeps some 20 KB for each until that has expired,
        # even if it has ended: with ten minutes, gigabytes. So a thread watches them.
        self._pending: dict[int, tuple[Call, Deadline, int]] = {}
        self._noting = threading.Lock()
        self._stopped = False
        self._ended = threading.Event()
        self._watch = daemon(f"kerasdist-native rank {self.rank}", self._look)
        self._watch.start()

    def prepare(self) -> None:
        """See `CheckedCommunicator.prepare`: connect TensorFlow's servers."""
        if self._in_use and not is_serving():
            _LOG.warning(
                "kerasdist: TensorFlow was used before transport='native' was set up. "
                "Its devices are renamed now: variables, datasets and functions that "
                "were created before can't be used any more. Create the strategy first."
            )
        self.group = serve(self)
        self.barrier()

    # For sums on devices, in graphs and eagerly.

    def begin(self, dtype: str, elements: int, detail: int) -> int:
        """Begin a sum on devices; return its number, the instance key.

        Args:
            dtype: The dtype's name.
            elements: Number of elements, 0 if unknown.
            detail: A checksum of the shapes.
        """
        with self._lock:
            if self._failure is not None:
                raise copy_to_raise(self._failure)
            if self._closed:
                raise errors.TransportClosed(
                    "This communicator is closed. Received: a sum on devices. Create "
                    "a new strategy to go on."
                )
            self.sequence += 1
            call = Call(self.sequence, "all_reduce", "sum", dtype, elements, detail)
            self.supervisor.call = call
            began = 0 if self._recorder is None else now()
            with self._noting:
                if self._stopped:
                    raise Aborted
                self._pending[call.sequence] = call, Deadline(self.timeout), began
            return call.sequence

    def end(self, sequence: int) -> None:
        """End a sum on devices."""
        with self._noting:
            found = self._pending.pop(sequence, None)
        recorder = self._recorder
        if found is not None and found[2] and recorder is not None:
            call, _, began = found
            size = call.elements * itemsize(call.dtype)
            recorder.add(call.kind, began, now(), size, call)

    def translate(self, error: BaseException) -> errors.CollectiveError | None:
        """Return the job's failure behind TensorFlow's error; None for another cause.

        Waits, if necessary, until the workers agree on the failure.
        """
        if self._failure is None and not _COLLECTIVE.search(str(error)):
            return None
        call, here = self.supervisor.call, self.peers[self.rank]
        seen = self._seen(error)
        failure = explain(seen, call, here, "", self.supervisor, self._failure)
        if failure is not None and self._failure is None:
            self.abort(failure)
        return self._failure

    # Failures.

    def _seen(self, error: BaseException) -> BaseException:
        """Translate TensorFlow's error into one that transports raise."""
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
                f"{self.supervisor.call}; TensorFlow reports: {said}. All ranks must "
                "call the same collectives in the same order on the same shapes: does "
                "the script branch on the rank, or does a model differ?"
            )
        return errors.CollectiveError(
            f"TensorFlow's collective {self.supervisor.call} failed at step "
            f"{self.step}: {said}"
        )

    def _look(self) -> None:
        """End all sums on devices if one is late; in a thread of its own."""
        late = None
        while late is None and not self._ended.wait(_LOOK_SECONDS):
            with self._noting:
                # All have the same time limit: the first to begin is late first.
                first = next(iter(self._pending.values()), None)
            late = first[0] if first is not None and first[1].expired else None
        if late is not None:
            here = self.peers[self.rank]
            silent = PeerSilent(self.peers[self.rank - 1], "its time is over")
            self.abort(explain(silent, late, here, "", self.supervisor, self._failure))

    def _abort(self) -> None:
        super()._abort()
        with self._noting:
            self._stopped = True
        if self._pending:
            # Only then, because other strategies of this process may continue.
            remote.abort_collectives(str(self._failure or "the strategy was closed"))

    def _close(self) -> None:
        self._ended.set()
        if threading.current_thread() is not self._watch:
            self._watch.join(_JOIN_SECONDS)
        super()._close()
