"""Changes of a job's workers, played in one process, for tests of the data's division.

A strategy of one process is told at any time which rank it has, and how many replicas
each rank has: `Played`. All other workers do in each collective what this one does.
`Membership`s are tuples of the names of the present workers, in rank order. `take_all`
lets each worker of a schedule of memberships run alone, and puts the rows together that
the workers have taken in each step. One that joins later takes steps without the others
before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator

from kerasdist._keras.data.arrays import RepeatableIterator
from kerasdist._keras.protocols import hooks_of
from kerasdist.cluster import Cluster
from kerasdist.collectives.checked import SingleCommunicator
from kerasdist.strategies.elastic_data import ElasticData
from kerasdist.strategies.options import Options
from kerasdist.strategies.sync.extended import DataParallelStrategy, SynchronousExtended

Membership = str | Sequence[str]


class _Echo(SingleCommunicator):
    """A communicator whose other ranks do the same as this one."""

    def place(self, rank: int, size: int) -> None:
        self.rank, self.size, self.ranks = rank, size, tuple(range(size))

    def all_gather(self, array: Any) -> list[Any]:
        return [np.atleast_1d(np.array(array)) for _ in self.ranks]

    def all_reduce(self, buffers: Any, op: str = "sum", **options: Any) -> list[Any]:
        factor = self.size if op == "sum" else 1
        return [
            np.array(buffer) * factor if factor > 1 else np.array(buffer)
            for buffer in buffers
        ]

    def broadcast(self, buffers: Any, root: int = 0) -> list[Any]:
        return [np.array(buffer) for buffer in buffers]


class _Job:
    has_servers = False
    announcements = None

    def __init__(self) -> None:
        self.communicator = _Echo()
        self.replicas: tuple[int, ...] = (1,)

    def close(self, error: BaseException | None = None) -> None:
        del error


class _Elastic(SynchronousExtended):
    data_class = ElasticData


class Played:
    """A strategy whose rank, and whose other workers, are changed by the test."""

    def __init__(self, local: int = 1, *, elastic: bool = True, **options: Any) -> None:
        self.job = _Job()
        given = {"initial_state": "check", "shard": "rows", "data": "auto"}
        given |= {"bucket_size": 1 << 20, "compression": None, **options}
        self.local = local
        self.place(0, (local,))
        self.strategy = DataParallelStrategy(
            Cluster(rank=0, size=1),
            [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(local)],
            self.job,
            Options(**given),
            _Elastic if elastic else SynchronousExtended,
        )
        self.hooks = hooks_of(self.strategy)

    def place(self, rank: int, replicas: Sequence[int]) -> None:
        self.job.replicas = tuple(replicas)
        self.job.communicator.place(rank, len(self.job.replicas))

    def epochs(self, **data: Any) -> Any:
        iterator = TFEpochIterator(distribute_strategy=self.strategy, **data)
        iterator.reset()
        return iterator

    def rows(self, element: Any) -> tuple[list[Any], int | None]:
        """Return the rows of this worker's replicas, and those of the global batch.

        Each row is a list of the numbers in its leaves.
        """
        facts: list[Any] = []

        def note(data: Any) -> Any:
            batch, rows, total = self.hooks.data.split(self.hooks.data.unwrap(data))
            facts.append((batch, int(rows), None if total is None else int(total)))
            return tf.constant(0)

        self.strategy.run(note, args=(element,))
        found = []
        for batch, rows, _ in facts:
            found += _rows_of(batch)[:rows]
        return found, facts[0][2]


def _rows_of(batch: Any) -> list[Any]:
    leaves = []
    for leaf in tf.nest.flatten(batch):
        if isinstance(leaf, tf.SparseTensor):
            leaf = tf.sparse.to_dense(leaf)
        if isinstance(leaf, tf.RaggedTensor):
            leaves.append([str(row) for row in leaf.to_list()])
        elif leaf is not None and leaf.shape.rank:
            leaves.append(leaf.numpy().tolist())
    return [list(row) for row in zip(*leaves, strict=True)]


def changes_at(steps: Mapping[int, Membership], step: int) -> Membership:
    return steps[max(begin for begin in steps if begin <= step)]


def one_process(epochs: int, data: Callable[[], Any]) -> list[list[Any]]:
    played = Played(elastic=False)
    return [rows for rows, _ in _steps(played, epochs, data(), lambda *_: None)]


def take_all(
    steps: Mapping[int, Membership],
    epochs: int,
    data: Callable[[], Any],
    *,
    local: int = 1,
    aborted: bool = True,
    **options: Any,
) -> list[list[Any]]:
    """Return the rows of each step, taken by all workers of a job together.

    `steps`: from which step on which workers take part. `data` returns the arguments of
    `Played.epochs`. `local`: the number of each worker's replicas. `aborted`: a step
    has been begun by the former workers when they change, and is done again; otherwise
    they change between two steps.
    """
    workers = sorted({name for members in steps.values() for name in members})
    taken: dict[int, dict[str, Any]] = {}
    for name in workers:
        played = Played(local, **options)

        def change(step: int, iterator: Any, name: str = name, played: Any = played):
            members = changes_at(steps, step)
            if name not in members:
                if not any(name in steps[later] for later in steps if later > step):
                    raise _Lost
                members = [name]  # its rows don't count before it has joined
            if aborted and step and step in steps:
                # The former members have begun the step.
                next(iterator.inner)
            played.place(members.index(name), [local] * len(members))
            if step and step in steps:
                iterator.renew()

        for step, found in enumerate(_steps(played, epochs, data(), change)):
            taken.setdefault(step, {})[name] = found
    together = []
    for step, parts in sorted(taken.items()):
        members = changes_at(steps, step)
        rows = [row for name in members for row in parts[name][0]]
        totals = {parts[name][1] for name in members}
        if totals not in ({len(rows)}, {None}):
            raise AssertionError(f"step {step}: {totals} of {len(rows)} rows")
        together.append(rows)
    return together


class _Lost(Exception):
    pass


def _steps(
    played: Played, epochs: int, data: Mapping[str, Any], change: Callable[..., None]
) -> Iterator[Any]:
    step = 0
    with contextlib.suppress(_Lost):
        change(0, None)
        iterator = played.epochs(**data)
        for _ in range(epochs):
            with iterator.catch_stop_iteration():
                for _, _, batches in iterator:
                    change(step, batches)
                    repeatable = isinstance(batches, RepeatableIterator)
                    try:
                        taken = next(batches.inner if repeatable else batches)
                    except StopIteration:
                        break
                    found = played.rows(taken)
                    if repeatable:
                        batches.commit()
                    yield found
                    step += 1
