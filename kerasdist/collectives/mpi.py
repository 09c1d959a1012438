"""`transport="mpi"`: collectives by MPI, through mpi4py.

    mpirun -n 4 python train.py

`mpirun` defines ranks and size: no other cluster settings are needed, and no secret,
since MPI makes the connections. If a worker dies, `mpirun` ends the others. A worker
that is frozen or late causes a `CollectiveTimeout` on the others.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.cluster.schedulers import MPI_VARIABLES
from kerasdist.collectives.checked import CheckedCommunicator
from kerasdist.collectives.fused_buffer import FusedBuffer
from kerasdist.collectives.row_exchange import Array
from kerasdist.transport.base import (
    Aborted,
    CallMismatch,
    Collective,
    Peer,
    PeerSilent,
)
from kerasdist.transport.deadline import Deadline, Timeouts
from kerasdist.transport.framing import (
    HEADER_BYTES,
    FrameType,
    pack_header,
    unpack_header,
)
from kerasdist.transport.liveness.failure_protocol import Supervisor, final_exception
from kerasdist.transport.tracing import SpanTimer

_HEADER_TAG = 1
# Requests are polled until they are done: at first all the time, then with pauses, so
# that a rank that waits for a slow one doesn't take its core.
_EAGER_SECONDS = 0.0005
_PAUSE_SECONDS = 0.0002
_STARTED = (*MPI_VARIABLES, "MPI_LOCALNRANKS")


def transport_for(cluster: Cluster, transport: str) -> str:
    """Return the transport of processes that only MPI can connect: "mpi".

    Args:
        cluster: The place of such a process.
        transport: That which was asked for.

    Raises:
        ClusterError: It's neither "auto" nor "mpi".
    """
    if transport not in ("auto", "mpi"):
        raise errors.ClusterError(
            "Processes that were started by MPI don't know each other's addresses. "
            f"Received: transport={transport!r}, {_variables()}. Expected "
            "transport='auto' or 'mpi'. For this transport start the job with "
            "`kerasdist run`, with `srun`, or with TF_CONFIG."
        )
    return "mpi"


def join(cluster: Cluster, timeouts: Timeouts) -> tuple[Cluster, MpiCommunicator]:
    """Connect all processes that `mpirun` started.

    Args:
        cluster: The settings, if there are any besides MPI's; they must agree.
        timeouts: `startup` and `collective` are used.

    Returns:
        The cluster with this worker's rank, and the communicator.

    Raises:
        ClusterError: mpi4py or MPI is missing, this process wasn't started by
            `mpirun`, or the settings disagree with MPI.
        StartupError: The other workers didn't create their strategies in time.
    """
    mpi = _load(cluster)
    world = mpi.COMM_WORLD
    rank, size = int(world.Get_rank()), int(world.Get_size())
    if cluster.source == "MPI" and (cluster.rank, cluster.size) != (rank, size):
        raise errors.ClusterError(
            f"`mpirun` started this process as rank {cluster.rank} of {cluster.size}, "
            "but the MPI that mpi4py uses doesn't know that. Received: rank "
            f"{rank} of {size} from {mpi.Get_library_version().split(',')[0].strip()}; "
            f"{_variables()}. Start the job with the `mpirun` of that MPI, or install "
            "mpi4py for the other one (`pip install --no-binary mpi4py mpi4py`)."
        )
    known = cluster.source not in ("none", "PMIx")
    if known and (cluster.rank, cluster.size) != (rank, size):
        raise errors.ClusterError(
            f"{cluster.source} and MPI disagree on this worker's rank. Received: rank "
            f"{cluster.rank} of {cluster.size} from {cluster.source}, rank {rank} of "
            f"{size} from MPI. Unset TF_CONFIG: with transport='mpi' `mpirun` sets it."
        )
    if not _MpiProcess.joined:
        _MpiProcess.joined = True
        atexit.register(_abort_after_failure)
    deadline = Deadline(timeouts.startup)
    # A communicator of its own: the script's use of MPI doesn't interfere.
    own, request = world.Idup()
    names = np.zeros((size, 256), np.uint8)
    here = f"{mpi.Get_processor_name()} {os.getpid()}".encode()[:256]
    names[rank, : len(here)] = np.frombuffer(here, np.uint8)
    try:
        _wait([request], deadline, lambda: False)
        _wait([own.Iallgather(mpi.IN_PLACE, names)], deadline, lambda: False)
    except TimeoutError:
        _MpiProcess.failed = True
        raise errors.StartupError(
            f"Not all of MPI's {size} processes created their strategies within "
            f"{timeouts.startup:g} s. All must run the same script; or give them more "
            "time with `startup_timeout=`."
        ) from None
    texts = [row.tobytes().rstrip(b"\0").decode("utf-8", "replace") for row in names]
    hosts, pids = zip(*(text.rsplit(" ", 1) for text in texts), strict=True)
    peers = [
        Peer(number, f"{host}, pid {pid}")
        for number, (host, pid) in enumerate(zip(hosts, pids, strict=True))
    ]
    if cluster.source == "none" or cluster.needs_mpi:
        # MPI's workers have no ports; these only make their addresses unique.
        workers = tuple(f"{host}:{number + 1}" for number, host in enumerate(hosts))
        cluster = Cluster(
            rank=rank, size=size, workers=workers, task_index=rank, source="MPI"
        )
    return cluster, MpiCommunicator(mpi, own, peers, timeouts.collective)


def _variables() -> str:
    """Return MPI's variables as an error message shows them."""
    return ", ".join(
        f"{name}={os.environ[name]}" for name in MPI_VARIABLES if name in os.environ
    )


def _load(cluster: Cluster) -> Any:
    """Import mpi4py, which starts MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if cluster.needs_mpi:
            raise errors.ClusterError(
                "This process was started by MPI, and only MPI can connect it with the "
                f"others: that needs mpi4py. Received: {type(error).__name__}: "
                f"{error}; {_variables()}. Install it (`pip install "
                "'kerasdist[mpi]'`, or for an MPI that is there already `pip install "
                "mpi4py`), or start the job without MPI: `kerasdist run -n "
                f"{max(2, cluster.size)} train.py`."
            ) from error
        raise errors.ClusterError(
            "transport='mpi' needs mpi4py and an MPI library. Received: "
            f"{type(error).__name__}: {error}. Install them, for example `pip install "
            "'kerasdist[mpi]'`, or use transport='auto', which needs neither."
        ) from error
    if MPI.COMM_WORLD.Get_size() == 1 and not any(n in os.environ for n in _STARTED):
        raise errors.ClusterError(
            "transport='mpi' needs a process that was started by `mpirun`. Received: "
            "none of its environment variables. Start the script with `mpirun -n 2 "
            "python train.py` (by the same MPI that mpi4py uses), or use "
            "transport='auto'."
        )
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise errors.ClusterError(
            "TensorFlow calls MPI from threads of its own, and MPI was started without "
            f"support of that. Received: thread level {MPI.Query_thread()}. Leave "
            "`mpi4py.rc.threads` and `mpi4py.rc.thread_level` as they are."
        )
    return MPI


class _MpiProcess:
    """The state of MPI in this process.

    Attributes:
        joined: Whether it has joined the others.
        failed: Whether MPI can't be ended in an orderly way any more.
    """

    joined = False
    failed = False


def _abort_after_failure() -> None:
    """End the job after a failure: MPI_Finalize would wait for ranks that failed."""
    if _MpiProcess.failed or final_exception() is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(1)


class MpiCommunicator(CheckedCommunicator):
    """Collectives by MPI.

    They are non-blocking, so that each has its deadline. Before each the ranks exchange
    its fingerprint. Sums of float16 and bfloat16 are computed in float32 and rounded
    once.

    After a failure this process ends all processes of the job when it ends, as
    there's no orderly way to end MPI any more.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: MPI's communicator of this one's own.
        peers: All ranks, with their names in messages.
        timeout: Seconds that one collective may take.
    """

    def __init__(self, mpi: Any, comm: Any, peers: list[Peer], timeout: float) -> None:
        super().__init__(int(comm.Get_rank()), peers, Supervisor(), timeout)
        self._mpi = mpi
        self._comm = comm
        self._stopped = False
        # MPI may still write into the buffers of a call that was given up.
        self._kept: list[Any] = []

    def _reduce(self, source: FusedBuffer, lend: bool, collective: Collective) -> Array:
        elements, dtype, op = source.elements, source.dtype, collective.call.op
        deadline = collective.deadline
        timer = SpanTimer(self._recorder)
        flat = np.empty(elements, dtype)
        source.copy_to(flat, 0, elements)
        timer.end("pack", flat.nbytes)
        self._barrier(collective)
        timer.end("wait")
        if dtype.name in ("float16", "bfloat16"):
            return self._floats(flat.astype(np.float32), op, deadline).astype(dtype)
        if dtype.kind == "f":
            return self._floats(flat, op, deadline)
        return self._all_reduce(flat, op, deadline)

    def _floats(self, flat: Array, op: str, deadline: Deadline) -> Array:
        if op in ("sum", "prod"):
            return self._all_reduce(flat, op, deadline)
        # MPI's minimum and maximum of NaN depend on the order: ranks would differ.
        missing = np.isnan(flat)
        result = self._all_reduce(np.where(missing, 0, flat), op, deadline)
        result[self._all_reduce(missing, "max", deadline)] = np.nan
        return result

    def _all_reduce(self, flat: Array, op: str, deadline: Deadline) -> Array:
        result = np.empty_like(flat)
        # MPI has no minimum and maximum of its own type for bool.
        kind = np.dtype(np.uint8) if flat.dtype == bool else flat.dtype
        given, into = flat.view(kind), result.view(kind)
        how = getattr(self._mpi, op.upper())
        self._finish(
            lambda: self._comm.Iallreduce(given, into, how), deadline, given, into
        )
        return result

    def _gather(self, views: list[memoryview], collective: Collective) -> None:
        self._barrier(collective)
        sizes = [len(view) for view in views]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        mine = np.frombuffer(views[self.rank], np.uint8).copy()
        every = np.empty(int(starts[-1]), np.uint8)
        byte = self._mpi.BYTE
        self._finish(
            lambda: self._comm.Iallgatherv(
                [mine, mine.size, byte], [every, sizes, starts[:-1].tolist(), byte]
            ),
            collective.deadline,
            mine,
            every,
        )
        for rank, view in enumerate(views):
            if rank != self.rank:
                view[:] = every[starts[rank] : starts[rank + 1]].data

    def _broadcast(self, view: memoryview, root: int, collective: Collective) -> None:
        self._barrier(collective)
        data = np.frombuffer(view, np.uint8).copy()
        self._finish(
            lambda: self._comm.Ibcast([data, data.size, self._mpi.BYTE], root),
            collective.deadline,
            data,
        )
        view[:] = data.data

    def _barrier(self, collective: Collective) -> None:
        """Exchange the call's fingerprint with all ranks, which is also a barrier."""
        call, deadline = collective
        others = [rank for rank in range(self.size) if rank != self.rank]
        mine = bytearray(pack_header(FrameType.DATA, 0, call))
        headers = {rank: bytearray(HEADER_BYTES) for rank in others}
        if self._stopped:
            raise Aborted
        receiving = {r: self._comm.Irecv(headers[r], r, _HEADER_TAG) for r in others}
        sending = [self._comm.Isend(mine, r, _HEADER_TAG) for r in others]
        self._kept = [mine, headers, receiving, sending]
        try:
            _wait([*receiving.values(), *sending], deadline, lambda: self._stopped)
        except TimeoutError:
            silent = [r for r, request in receiving.items() if not request.Test()]
            peer = self.peers[silent[0] if silent else others[0]]
            raise PeerSilent(peer, "nothing was received from it") from None
        for rank, header in headers.items():
            _, _, theirs = unpack_header(header)
            if theirs != call:
                raise CallMismatch(self.peers[rank], call, theirs)

    def _finish(
        self, start: Callable[[], Any], deadline: Deadline, *buffers: Any
    ) -> None:
        if self._stopped:
            raise Aborted
        request = start()
        self._kept = [request, *buffers]
        try:
            _wait([request], deadline, lambda: self._stopped)
        except TimeoutError:
            peer = self.peers[(self.rank + 1) % self.size]
            raise PeerSilent(peer, "the data weren't received") from None
        self._kept = []

    def _abort(self) -> None:
        self._stopped = True
        if self._failure is not None:
            _MpiProcess.failed = True

    def _close(self) -> None:
        """Keep MPI's communicator: to free it is a collective of all ranks."""


def _wait(requests: list[Any], deadline: Deadline, stopped: Callable[[], bool]) -> None:
    """Wait until all requests are done.

    Raises:
        TimeoutError: The deadline passed.
        Aborted: `stopped` returned True.
    """
    began = time.monotonic()
    for request in requests:
        while not request.Test():
            if stopped():
                raise Aborted
            if deadline.expired:
                raise TimeoutError
            pause = time.monotonic() - began > _EAGER_SECONDS
            time.sleep(_PAUSE_SECONDS if pause else 0)
