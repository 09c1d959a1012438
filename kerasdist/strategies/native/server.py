"""This process's gRPC server, through which TensorFlow's collectives communicate.

TensorFlow can start only one in a process, and never ends it. Each worker starts it
on a free port of its own; the ring that connects the workers already distributes the
addresses, and each adds all of them to its TensorFlow cluster.
"""

from __future__ import annotations

import contextlib
import logging
import os

import numpy as np
import tensorflow as tf

from kerasdist import _tf, errors
from kerasdist._tf import remote
from kerasdist.cluster.address import split_address
from kerasdist.collectives import Communicator
from kerasdist.transport.rendezvous.open_servers import narrow, report_unprotected
from kerasdist.transport.rendezvous.ports import on_free_port

_LOG = logging.getLogger("kerasdist")
# Distinct from the keys that TensorFlow's own strategies count up from 1.
_FIRST_GROUP = 0x4B44_0000
# Each job has a group of the workers, and one of all replicas.
_GROUPS_PER_JOB = 2


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
        The first of the job's group keys, that of the workers. The next one is for
        the job's replicas. No other job of these processes gets them.

    Raises:
        ClusterError: On all ranks, if one was a worker of another cluster before.
            The ring can't be used any more.
    """
    remote.reach_directly(split_address(peer.address)[0] for peer in ring.peers)
    host = ring.peers[ring.rank].address.rpartition(":")[0]
    if Server.rank is None:
        _start_server(ring.rank, host)
    text = f"{Server.rank} {Server.address} {','.join(Server.workers)}".encode()
    heard = ring.all_gather(np.frombuffer(text, np.uint8))
    said = [part.tobytes().decode().split(" ") for part in heard]
    workers = tuple(address for _, address, _ in said)
    moved = [str(r) for r, (was, _, _) in enumerate(said) if was != str(r)]
    known = {before for _, _, before in said}
    if moved or known not in ({""}, {",".join(workers)}):
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
        _tf.serve_collectives(ring.rank, dict(enumerate(workers)))
        Server.workers = workers
    (group,) = ring.all_reduce([np.int64(Server.next_group)], "max")
    Server.next_group = int(group) + _GROUPS_PER_JOB
    return int(group)


def _start_server(rank: int, host: str) -> None:
    """Start the server on a free port."""

    def listen(port: int) -> None:
        _tf.serve_collectives(rank, {rank: f"{host}:{port}"})

    port = on_free_port(listen, tf.errors.UnknownError)
    Server.rank, Server.address = rank, f"{host}:{port}"
    narrowed = narrow(Server.address)
    text = report_unprotected(Server.address, narrowed, os.environ)
    _LOG.warning("kerasdist: %s", text)
