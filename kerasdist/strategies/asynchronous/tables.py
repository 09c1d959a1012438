"""The tables at the servers that one strategy's workers train, see `weights`."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras import own_steps
from kerasdist.strategies.asynchronous.step_count import StepCount
from kerasdist.strategies.asynchronous.weights import SharedWeights, key_of
from kerasdist.strategies.asynchronous.workers import AsyncWorkers
from kerasdist.strategies.reduce.consensus import Consensus

__all__ = ["SharedTables"]


class SharedTables:
    """All tables of one strategy; see `_keras.protocols.DynamicWeightHooks`.

    Args:
        workers: The workers that train them.

    Attributes:
        count: Counts the steps of all workers.
        progress: See `StepCount.progress`.
        fits: How often `fit` was called.
    """

    def __init__(self, workers: AsyncWorkers) -> None:
        self._workers = workers
        self._consensus = Consensus(workers)
        self._all: list[SharedWeights] = []
        # The tables of this `fit`: opened by all workers together, and by each itself.
        self._agreed: SharedWeights | None = None
        self._own: list[SharedWeights] = []
        self.count = StepCount(workers.devices[0])
        self.progress = self.count.progress
        self.fits = 0
        self._resumed: int | None = None
        self._trained: tuple[Sequence[Any], Any, Sequence[bool]] = ((), None, ())

    @property
    def _in_use(self) -> list[SharedWeights]:
        return [*([] if self._agreed is None else [self._agreed]), *self._own]

    @property
    def staleness(self) -> dict[int, int]:
        """Return how often this worker has read at which staleness."""
        counts: collections.Counter[int] = collections.Counter()
        for weights in self._all:
            counts.update(weights.table.observed)
        return dict(sorted(counts.items()))

    def begin_fit(
        self, variables: Sequence[Any], optimizer: Any, sparse: Sequence[bool]
    ) -> None:
        """Prepare to train these variables with this optimizer, on all workers.

        `sparse` has for each variable whether few of its rows change in a step. A
        late worker waits for `join`.
        """
        self.fits += 1
        self._trained = variables, optimizer, sparse
        steps, self._resumed = self._resumed, None
        if self._workers.client.joining:
            return
        self._own = []
        self._agreed = self._table(variables, sparse) if variables else None
        self.rebase()
        if self._agreed is None:
            self.count.begin(None, 0, None)
            return
        self._agreed.pull()
        self._workers.communicator.barrier()
        self.count.begin(optimizer, self._agreed.table.updates, steps)

    @property
    def offset(self) -> int:
        """The count of the optimizer of `fit` before the first update of its table."""
        return self.count.offset_of(self._trained[1])

    def join(self, offset: int) -> None:
        """Train the variables of `begin_fit` with the others, whose table exists.

        Args:
            offset: The others' `offset`.
        """
        variables, optimizer, sparse = self._trained
        self._agreed = self._table(variables, sparse) if variables else None
        if self._agreed is not None:
            self._agreed.pull()
        self.count.join(optimizer, offset)

    def resume_at(self, steps: int | None) -> None:
        """Set the step count before `begin_fit`, on all workers; the chief's counts.

        None: the count stays, or is an optimizer's own if that is new.
        """
        # Only the chief may be able to read the file.
        known = int(self._consensus.of_chief(-1 if steps is None else steps))
        self._resumed = known if known >= 0 else None

    def note_updates(self, weights: SharedWeights, updates: Any) -> None:
        """Record the number of a table's updates by all workers."""
        if weights is self._agreed:
            self.count.note(updates)

    def steps_of(self, optimizer: Any) -> Any | None:
        """Return the steps by all workers, int64; None: the optimizer's own count."""
        return None if self._agreed is None else self.count.of(optimizer)

    def prepare_update(self, variables: Sequence[Any], touched: Sequence[Any]) -> None:
        """Open a table before an optimizer's update of variables, if there is none."""
        values = [getattr(variable, "value", variable) for variable in variables]

        if not self._have_values(values):
            return

        def prepare(_: Any) -> None:
            self.table_of(values, touched)

        if self._workers.local_replicas == 1:
            prepare(None)
        else:
            tf.distribute.get_replica_context().merge_call(prepare)

    def exchange_update(
        self, optimizer: Any, variables: Sequence[Any], touched: Sequence[Any]
    ) -> None:
        """Exchange the weights after an optimizer's update, in replica context.

        `touched` has for each variable indices of all rows that may have changed, or
        None if they aren't known.
        """
        if self._workers.excluding:
            return
        values = [getattr(variable, "value", variable) for variable in variables]
        if not self._have_values(values):
            self._workers.ops.call(_too_early, [], [tf.int32], [tf.TensorShape([])])
            return
        window = getattr(optimizer, "gradient_accumulation_steps", None)
        steps = own_steps(optimizer) if window else None
        known = [indices for indices in touched if indices is not None]

        def merge(_: Any, *known: Any) -> Any:
            local = iter([self._workers.local(indices)[0] for indices in known])
            own = [None if indices is None else next(local) for indices in touched]

            def exchange() -> Any:
                keys = [key_of(variable) for variable in values]
                pairs = zip(keys, own, strict=True)
                self.table_of(values, own).exchange(
                    {key: rows for key, rows in pairs if rows is not None}
                )
                return tf.constant(0)

            if steps is None:
                return exchange()
            count = self._workers.local(steps)[0]
            ended = tf.equal(count % tf.cast(window, count.dtype), 0)
            return tf.cond(ended, exchange, lambda: tf.constant(0))

        if self._workers.local_replicas == 1:
            merge(None, *known)
        else:
            replica = tf.distribute.get_replica_context()
            replica.merge_call(merge, args=tuple(known))

    def table_of(
        self, variables: Sequence[Any], touched: Sequence[Any]
    ) -> SharedWeights:
        """Return the table of these variables; open it if there is none.

        Must be called before a step updates them: each worker's changes count from
        there.

        Args:
            variables: The variables.
            touched: For each of them indices of all rows that the step may change, or
                None if they aren't known.
        """
        keys = [key_of(variable) for variable in variables]
        for weights in self._in_use:
            if set(keys) <= set(weights.keys):
                return weights
        with tf.init_scope():
            weights = self._table(variables, [few is not None for few in touched])
        self._own.append(weights)
        return weights

    def rebase(self) -> None:
        """Take rank 0's weights if some have changed since all workers had the same.

        All workers call it, outside of any step.
        """
        weights = self._agreed
        if weights is None:
            return
        communicator = self._workers.communicator
        changed = [np.bool_(weights.changed())]
        if not communicator.all_reduce(changed, "max")[0]:
            return
        if communicator.rank == 0:
            weights.push()
        self.count.exclude_update()
        communicator.barrier()
        weights.pull()
        communicator.barrier()

    def pull(self) -> None:
        """Take the servers' values, between two meetings of all workers."""
        for weights in self._in_use:
            weights.pull()

    @property
    def has_begun(self) -> bool:
        """Return whether there is a table."""
        return bool(self._all)

    def settle(self) -> None:
        """Meet; if a worker has taken steps since the last time, all take the weights.

        All workers call it at the same point.
        """
        dirty = any(weights.dirty for weights in self._in_use)
        if self._consensus.any_of(dirty):
            self.pull()
            self._workers.communicator.barrier()

    def average_own(self, variables: Sequence[Any]) -> None:
        """Set each variable to its mean over this worker's replicas."""
        for variable in variables if self._workers.local_replicas > 1 else ():
            parts = self._workers.copies(variable)
            mean: Any = np.mean([np.asarray(p, np.float64) for p in parts], axis=0)
            for part in parts:
                part.assign(tf.cast(mean, part.dtype))

    def _table(self, variables: Sequence[Any], sparse: Sequence[bool]) -> SharedWeights:
        keys = [key_of(variable) for variable in variables]
        for weights in self._all:
            if weights.keys == keys:
                return weights
        self._workers.check_joined()
        weights = SharedWeights(self._workers, variables, sparse, self.note_updates)
        self._all.append(weights)
        return weights

    def _have_values(self, variables: Sequence[Any]) -> bool:
        """Return whether variables have values: not in the trace that creates them.

        TensorFlow discards that trace, initializes them, and traces again.
        """
        if _tf.executing_eagerly():
            return True
        copies = [self._workers.copies(v)[0] for v in variables]
        with tf.init_scope():
            return all(bool(copy.is_initialized()) for copy in copies)


def _too_early() -> list[Any]:
    raise RuntimeError(
        "A step ran in the function that creates its variables: their changes would be "
        "this worker's alone. Build the model and the optimizer before the first step: "
        "`model.build(...)`, `optimizer.build(model.trainable_variables)`."
    )
