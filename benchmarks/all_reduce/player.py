"""One process of one column: `player.py COLUMN CONTROL [RANK SIZE STORE]`.

Takes orders of `run.py`: time all-reduces of so many bytes. Every column is in its own
environment, so imports stand where they are needed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import serve, timed

# What a column gives: its rank, and from an array to a call that all-reduces it and
# returns something that `np.asarray` understands.
Column = tuple[int, Callable[[Any], Callable[[], Any]]]


def copy(rank: str, size: str, store: str) -> Column:
    """Every process copies the same bytes, of several at once: what memory gives."""

    def prepare(array: Any) -> Callable[[], Any]:
        to = np.zeros_like(array)

        def call() -> Any:
            np.copyto(to, array)
            return to * int(size)  # as if it had been summed, for the check

        def bare() -> Any:
            np.copyto(to, array)
            return None

        call.bare = bare  # type: ignore[attr-defined]
        return call

    return int(rank), prepare


def communicator(transport: str, compiled: bool = True) -> Column:
    from kerasdist.cluster import resolve
    from kerasdist.collectives import connect, fused_buffer

    if not compiled:
        fused_buffer.compiled_combine = None
    elif transport == "shared_memory" and fused_buffer.compiled_combine is None:
        raise RuntimeError(
            "Received: kerasdist that was installed without a C compiler. Install one, "
            "and kerasdist again, or leave the column out (--columns)."
        )

    cluster = resolve()
    # Different hosts: else workers of one host use its own sockets instead of TCP.
    host = str(cluster.rank) if transport == "tcp" else None
    job = connect(cluster, transport=transport, host=host)
    return (
        job.communicator.rank,
        lambda array: lambda: job.communicator.all_reduce([array])[0],
    )


def gloo(rank: str, size: str, store: str) -> Column:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(size)
    )

    def prepare(array: Any) -> Callable[[], Any]:
        tensor = torch.from_numpy(array.copy())

        def call() -> Any:
            # In place, as its users do; what comes of it grows, which costs nothing.
            dist.all_reduce(tensor)
            return tensor

        return call

    return int(rank), prepare


def mpi() -> Column:
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def prepare(array: Any) -> Callable[[], Any]:
        to = np.zeros_like(array)

        def call() -> Any:
            world.Allreduce(array, to)
            return to

        return call

    return world.rank, prepare


def strategy(kind: str) -> Column:
    """Tensors in and out of a `tf.function` under a strategy."""
    import tensorflow as tf

    made: Any
    if kind == "tensorflow":
        options = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        )
        made = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        rank = made.cluster_resolver.task_id
    else:
        import kerasdist

        made = kerasdist.RingStrategy()
        rank = made.rank

    def prepare(array: Any) -> Callable[[], Any]:
        value = tf.constant(array)

        def replica(tensor: Any) -> Any:
            context = tf.distribute.get_replica_context()
            # TensorFlow asks where a tensor is, and a function's argument has no place.
            placed = tf.identity(tensor)
            return context.all_reduce(tf.distribute.ReduceOp.SUM, placed)

        function = tf.function(lambda tensor: made.run(replica, args=(tensor,)))
        return lambda: function(value)

    return rank, prepare


def main() -> None:
    name, control, *more = sys.argv[1:]
    columns: dict[str, Callable[..., Column]] = {
        "memcpy": copy,
        "alone": copy,
        "shared_memory": lambda: communicator("shared_memory"),
        "numpy": lambda: communicator("shared_memory", compiled=False),
        "tcp": lambda: communicator("tcp"),
        "hierarchical": lambda: communicator("hierarchical"),
        "gloo": gloo,
        "mpi": mpi,
        "tensorflow": lambda: strategy("tensorflow"),
        "strategy": lambda: strategy("kerasdist"),
    }
    rank, prepare = columns[name](*more)
    calls: dict[int, Callable[[], Any]] = {}

    def answer(order: dict[str, Any]) -> Any:
        size = order["bytes"]
        if size not in calls:
            call = prepare(np.full(size // 4, 1.0, np.float32))
            if not (np.asarray(call()) == order["ranks"]).all():
                raise RuntimeError(f"{name} doesn't sum {size} bytes.")
            calls[size] = getattr(call, "bare", call)
        for _ in range(order["warm"]):
            calls[size]()
        return timed(calls[size], order["calls"], order["samples"])

    serve(control, rank, answer)
    if name == "tensorflow":
        os._exit(0)  # its server doesn't end by itself


if __name__ == "__main__":
    main()
