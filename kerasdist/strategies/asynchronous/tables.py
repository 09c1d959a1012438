"""The tables at the servers that one strategy's workers train, see `weights`."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.learning_rate import own_steps
from kerasdist._tf.variables import of_tensorflow
from kerasdist.collectives.row_exchange import Array
from kerasdist.strategies.asynchronous.live_group import AsyncWorkers
from kerasdist.strategies.asynchronous.weights import SharedWeights, key_of
from kerasdist.strategies.reduce.consensus import Consensus
from kerasdist.strategies.reduce.workers import in_all_replicas

# The number of steps that asynchronous workers have taken together.
#
# Each worker has a count of its own, which belongs to its weights: it's the number of
# steps in those that it received last. Schedules and warm-ups read it.
#
#     steps = updates of the table * window + offset + own steps of an open window
#
# The servers count the updates, beginning with 0 in each job; the offset is the
# optimizer's number of steps before that, from which a resumed one continues. An
# optimizer's own count, `iterations`, is that of its worker's steps, to which its
# moments belong.


class StepCount:
    """The step count of the optimizer of `fit`, and of optimizers before it.

    Args:
        device: The device in whose host's memory the counters are.
    """

    def __init__(self, device: str) -> None:
        self._device = _tf.host_of(device)
        # The updates of the table that all have opened.
        self._updates = _tf.own_variable(0, tf.int64, self._device)
        # With a reference, so that no other optimizer gets its id. Variables, so that a
        # step isn't traced again after training is resumed.
        self._offsets: dict[int, tuple[Any, Any]] = {}
        self._optimizer: Any = None
        self._begin = 0

    def note(self, updates: Any) -> None:
        """Record the number of updates by all workers; in any context."""
        self._updates.assign(tf.cast(updates, tf.int64))

    def begin(self, optimizer: Any, updates: int, steps: int | None) -> None:
        """Set the count at the start of `fit`; all workers call it alike.

        Args:
            optimizer: The optimizer of `fit`, or None.
            updates: How many updates the table has had.
            steps: How many steps all had taken where training is resumed; None: it
                isn't resumed, and a new optimizer has taken its own steps.
        """
        self._optimizer = optimizer
        if optimizer is None or (steps is None and id(optimizer) in self._offsets):
            return
        window = _window(optimizer)
        before = int(own_steps(optimizer).numpy()) if steps is None else steps
        self._set(optimizer, (before // window - updates) * window)

    def join(self, optimizer: Any, offset: int) -> None:
        """Set the count on a late worker: `offset` is that of the others."""
        self._optimizer = optimizer
        if optimizer is not None:
            self._set(optimizer, offset)

    def exclude_update(self) -> None:
        """Subtract an update that wasn't a step; all workers call it alike."""
        offset = self._offset(self._optimizer)
        if offset is not None:
            offset.assign_sub(_window(self._optimizer))

    def begin_epoch(self) -> None:
        """Record the beginning of an epoch, where all workers have the same count."""
        steps = self.of(self._optimizer)
        self._begin = 0 if steps is None else int(steps.numpy())

    def progress(self) -> tuple[int, int] | None:
        """Return the numbers of steps, in all and in this epoch, in the weights.

        None if not known, because no `fit` has used an optimizer.
        """
        steps = self.of(self._optimizer)
        if steps is None:
            return None
        known = int(steps.numpy())
        return known, known - self._begin

    def offset_of(self, optimizer: Any) -> int:
        """Return an optimizer's count before the first update of the table."""
        offset = self._offset(optimizer)
        return 0 if offset is None else int(offset.numpy())

    def of(self, optimizer: Any) -> Any | None:
        """Return the number of steps by all workers; int64, scalar, in any context.

        None for an optimizer that no `fit` has used.
        """
        offset = self._offset(optimizer)
        if offset is None:
            return None
        window = _window(optimizer)
        steps = self._updates.read_value() * window + offset.read_value()
        if window == 1:
            return steps
        own = tf.convert_to_tensor(own_steps(optimizer))
        return steps + tf.cast(own, tf.int64) % window

    def _offset(self, optimizer: Any) -> Any | None:
        return self._offsets.get(id(optimizer), (None, None))[1]

    def _set(self, optimizer: Any, offset: int) -> None:
        known = self._offset(optimizer)
        if known is None:
            variable = _tf.own_variable(offset, tf.int64, self._device)
            self._offsets[id(optimizer)] = optimizer, variable
        else:
            known.assign(offset)


def _window(optimizer: Any) -> int:
    """Return how many steps of an optimizer are one update."""
    return int(getattr(optimizer, "gradient_accumulation_steps", None) or 1)


class SharedTables:
    """All tables of one strategy; see `_keras.protocols.AsyncWeightHooks`.

    Args:
        workers: The workers that train them.

    Attributes:
        count: Counts the steps of all workers.
        progress: See `StepCount.progress`.
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
        self._workers.client.fits += 1
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

    @contextlib.contextmanager
    def sharing(
        self, optimizer: Any, variables: Sequence[Any], touched: Sequence[Any]
    ) -> Iterator[None]:
        """Share the update that the block makes with the others, in replica context.

        Args:
            optimizer: The optimizer that makes it.
            variables: The variables that it updates.
            touched: For each of them indices of all rows that may change, or None if
                they aren't known.
        """
        values = [of_tensorflow(variable) for variable in variables]
        before: list[Any] | None = None
        if self._have_values(values):
            in_all_replicas(self._workers, lambda: self._open(values, touched))
        else:
            before = [tf.identity(value.read_value()) for value in values]
        yield
        if self._workers.excluding:
            return
        window = getattr(optimizer, "gradient_accumulation_steps", None)
        steps = own_steps(optimizer) if window else None
        known = [indices for indices in touched if indices is not None]

        def ended() -> Any:
            """Return whether a window ends with this step."""
            if steps is None:
                return tf.constant(True)
            count = self._workers.local(steps)[0]
            return tf.equal(count % tf.cast(window, count.dtype), 0)

        def exchange(*known: Any) -> None:
            local = iter([self._workers.local(indices)[0] for indices in known])
            own = [None if indices is None else next(local) for indices in touched]

            def push() -> Any:
                keys = [key_of(variable) for variable in values]
                pairs = zip(keys, own, strict=True)
                self._open(values, own).exchange(
                    {key: rows for key, rows in pairs if rows is not None}
                )
                return tf.constant(0)

            if steps is None:
                push()
            else:
                tf.cond(ended(), push, lambda: tf.constant(0))

        def exchange_late(*before: Any) -> None:
            first = [self._workers.local(value)[0] for value in before]
            self._exchange_late(values, first, ended())

        with _tf.outside_of_xla():
            if before is None:
                in_all_replicas(self._workers, exchange, *known)
            else:
                in_all_replicas(self._workers, exchange_late, *before)

    def _exchange_late(
        self, variables: Sequence[Any], before: Sequence[Any], ended: Any
    ) -> None:
        """Exchange variables that had no values when the step was traced.

        So their table is opened by the step itself, with the values before it.
        """
        copies = [self._workers.copies(variable)[0] for variable in variables]
        after = [tf.convert_to_tensor(copy.read_value()) for copy in copies]

        def push(ends: Array, *arrays: Array) -> list[Any]:
            first, last = arrays[: len(before)], arrays[len(before) :]
            weights = self._open(variables, [None] * len(before), first)
            taken = weights.push_values(last) if ends else last
            return [*taken, weights.updates]

        *taken, updates = self._workers.ops.call(
            push, [ended, *before, *after], [*after, tf.TensorSpec([], tf.int64)]
        )
        for variable, value in zip(variables, taken, strict=True):
            for copy in self._workers.copies(variable):
                copy.assign(value)
        if self._agreed is None:
            return
        if {key_of(variable) for variable in variables} <= set(self._agreed.keys):
            self.count.note(updates)

    def _open(
        self,
        variables: Sequence[Any],
        touched: Sequence[Any],
        first: Sequence[Array] | None = None,
    ) -> SharedWeights:
        """Return the table of these variables; open it if there is none.

        Must be called before a step updates them: each worker's changes count from
        there; or be given their `first` values, those before that step.
        """
        keys = [key_of(variable) for variable in variables]
        for weights in self._in_use:
            if set(keys) <= set(weights.keys):
                return weights
        with tf.init_scope():
            sparse = [few is not None for few in touched]
            weights = self._table(variables, sparse, first, together=False)
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

    def pull_if_dirty(self, place: str) -> None:
        """Meet; if a worker has taken steps since the last time, all take the weights.

        All workers call it at the same `place` of the script, given in words.
        """
        dirty = any(weights.dirty for weights in self._in_use)
        if self._consensus.any_at(place, dirty):
            self.pull()
            self._workers.communicator.barrier()

    def average_own(self, variables: Sequence[Any]) -> None:
        """Set each variable to its mean over this worker's replicas."""
        for variable in variables if self._workers.local_replicas > 1 else ():
            parts = self._workers.copies(variable)
            mean: Any = np.mean([np.asarray(p, np.float64) for p in parts], axis=0)
            for part in parts:
                part.assign(tf.cast(mean, part.dtype))

    def _table(
        self,
        variables: Sequence[Any],
        sparse: Sequence[bool],
        first: Sequence[Array] | None = None,
        *,
        together: bool = True,
    ) -> SharedWeights:
        keys = [key_of(variable) for variable in variables]
        for weights in self._all:
            if weights.keys == keys:
                return weights
        self._workers.check_joined()
        weights = SharedWeights(
            *(self._workers, variables, sparse, self.note_updates, first, together)
        )
        self._all.append(weights)
        return weights

    def _have_values(self, variables: Sequence[Any]) -> bool:
        """Return whether variables have values: not in the trace that creates them.

        TensorFlow discards that trace, initializes them, and traces again.
        """
        if tf.executing_eagerly():
            return True
        copies = [self._workers.copies(v)[0] for v in variables]
        with tf.init_scope():
            return all(bool(copy.is_initialized()) for copy in copies)
