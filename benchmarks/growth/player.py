"""One worker of one job: `player.py CONTROL TRANSPORT [strategy]`.

Takes orders of `run.py`: time all-reduces, or steps of a loop under a strategy, with so
many bytes in so many variables.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import serve, timed


def bare(transport: str) -> tuple[int, Callable[[int, int], Callable[[], Any]]]:
    from kerasdist.cluster import resolve
    from kerasdist.collectives import connect

    cluster = resolve()
    host = str(cluster.rank) if transport == "tcp" else None
    communicator = connect(cluster, transport=transport, host=host).communicator

    def prepare(size: int, variables: int) -> Callable[[], Any]:
        buffers = [
            np.full(size // 4 // variables, 1.0, np.float32) for _ in range(variables)
        ]
        return lambda: communicator.all_reduce(buffers)

    return communicator.rank, prepare


def looped(transport: str) -> tuple[int, Callable[[int, int], Callable[[], Any]]]:
    """A step: read the variables, reduce as many gradients, update the variables."""
    import tensorflow as tf

    import kerasdist

    strategy = kerasdist.RingStrategy(transport=transport)

    def prepare(size: int, variables: int) -> Callable[[], Any]:
        with strategy.scope():
            made = [
                tf.Variable(tf.ones(size // 4 // variables)) for _ in range(variables)
            ]

        def replica() -> None:
            gradients = [variable * 0.5 for variable in made]
            context = tf.distribute.get_replica_context()
            means = context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
            for variable, mean in zip(made, means, strict=True):
                variable.assign_sub(0.01 * mean)

        return tf.function(lambda: strategy.run(replica))

    return strategy.rank, prepare


def main() -> None:
    control, transport, *kind = sys.argv[1:]
    rank, prepare = (looped if kind else bare)(transport)
    last: dict[tuple[int, int], Callable[[], Any]] = {}

    def answer(order: dict[str, Any]) -> Any:
        key = (order["bytes"], order["variables"])
        if key not in last:
            last.clear()  # one size's buffers at a time
            last[key] = prepare(*key)
        for _ in range(order["warm"]):
            last[key]()
        return timed(last[key], order["calls"], order["samples"])

    serve(control, rank, answer)


if __name__ == "__main__":
    main()
