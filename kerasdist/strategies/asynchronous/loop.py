"""Custom loops over the data that asynchronous workers train on.

    for batch in loop: train(batch)                       outside of a `tf.function`
    train(iterator)              it calls `next`; one trace serves all passes
    for batch in loop: ...       in a `tf.function`

All workers begin and end a pass together; there they meet. Between these two nothing
has an order over the workers, since each takes other numbers of batches. So a reduction
outside of a step is over this worker's replicas until its pass has ended.

A worker that leaves a pass before its end, with `break`, can't meet the others there,
since an error may have ended it: it does that before its next collective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras import LoopData
from kerasdist.strategies.asynchronous.dynamic_batches import (
    AsyncBatches,
    AsyncDataset,
)
from kerasdist.strategies.data.batch_split import split_part


class AsyncLoop(LoopData, _tf.DistributedIterable):
    """The iterable of a custom loop.

    Args:
        dynamic: The dataset's dynamic batches.
        dataset: The dataset.
    """

    def __init__(self, dynamic: AsyncDataset, dataset: Any) -> None:
        self.dataset = dataset
        self._dynamic = dynamic
        self._workers = dynamic.workers
        # The pass that is open.
        self._batches: AsyncBatches | None = None
        self._number = 0
        self._spec: Any = None
        self._in_graphs = LoopIterator(self, None)

    @property
    def element_spec(self) -> Any:
        """The specification of a replica's batch, of any number of rows."""
        if self._spec is None:
            spec = getattr(self.dataset, "element_spec", None)
            if spec is None or self._dynamic.source.is_distributed:
                example = _tf.select_replica(0, self._dynamic.example())
                spec = tf.nest.map_structure(tf.type_spec_from_value, example)
            self._spec = tf.nest.map_structure(_of_any_rows, spec)
        return self._spec

    def __iter__(self) -> Iterator[Any]:
        if _tf.executing_eagerly():
            return LoopIterator(self, self.begin())

        def begin() -> list[Any]:
            self.begin()
            return [np.int32(0)]

        self._workers.ops.call(begin, [], [tf.int32], [tf.TensorShape([])])
        return self._in_graphs

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Call a function with each batch of a pass, in a `tf.function`.

        TensorFlow makes this of a `for` statement there.

        Args:
            initial_state: A structure of tensors.
            reduce_func: Takes the state and a batch; returns the next state.
        """
        iterator: Any = iter(self)

        def body(more: Any, state: Any) -> tuple[Any, Any]:
            del more
            found = iterator.get_next_as_optional()
            present = found.has_value()
            return present, tf.cond(
                present, lambda: reduce_func(state, found.get_value()), lambda: state
            )

        return tf.while_loop(
            lambda more, _: more,
            body,
            (tf.constant(True), initial_state),
            parallel_iterations=1,
        )[1]

    def begin(self) -> AsyncBatches:
        """Begin a pass; all workers call it at the same place of the script."""
        if self._batches is not None:
            self.leave(self._batches)
        batches = self._batches = self._dynamic.begin_epoch()
        self._number += 1
        self._workers.passes.add(self)
        return batches

    def take(self) -> Any | None:
        """Return the next batch of the pass that is open, None at its end.

        At the end the workers have met, and have the same weights.
        """
        batches = self._batches
        if batches is None:
            return None
        for batch in batches:
            # Keras's steps get the number of rows, a user's steps don't.
            return split_part(batch)[0]
        batches.close()
        self._batches = None
        self._workers.passes.discard(self)
        self._meet(self._number)
        return None

    def leave(self, batches: AsyncBatches | None) -> None:
        """Leave a pass before its end, if it's the one that is open. Doesn't wait."""
        if batches is None or batches is not self._batches:
            return
        batches.close(wait=False)
        self._batches = None
        self._workers.passes.discard(self)
        number = self._number
        self._workers.live.owed.append(lambda: self._meet(number))

    def _meet(self, number: int) -> None:
        self._dynamic.weights.settle(f"ends pass {number} of {self._dynamic}")

    def next_in_graph(self) -> tuple[Any, Any]:
        """Return whether there's another batch, and the batch, in a graph."""
        return self._operations(at_end=self._nothing)

    def next_or_error(self) -> Any:
        """Return the next batch in a graph; it raises OutOfRangeError at the end."""

        def stop() -> list[Any]:
            raise StopIteration

        return self._operations(at_end=stop)[1]

    def _operations(self, at_end: Callable[[], list[Any]]) -> tuple[Any, Any]:
        devices = self._workers.devices
        spec = self.element_spec
        flat = tf.nest.flatten(spec, expand_composites=True)

        def take() -> list[Any]:
            batch = self.take()
            if batch is None:
                return [np.bool_(False), *at_end()]
            leaves = []
            for index in range(len(devices)):
                part = _tf.select_replica(index, batch)
                tf.nest.assert_same_structure(spec, part, expand_composites=True)
                leaves += tf.nest.flatten(part, expand_composites=True)
            return [np.bool_(True), *[leaf.numpy() for leaf in leaves]]

        more, *leaves = self._workers.ops.call(
            take,
            [],
            [tf.bool, *[each.dtype for each in flat] * len(devices)],
            [tf.TensorShape([]), *[each.shape for each in flat] * len(devices)],
        )
        parts = []
        for index, device in enumerate(devices):
            with tf.device(device):
                mine = leaves[index * len(flat) : (index + 1) * len(flat)]
                mine = [tf.identity(leaf) for leaf in mine]
            parts.append(tf.nest.pack_sequence_as(spec, mine, expand_composites=True))
        return more, parts[0] if len(parts) == 1 else _tf.regroup(parts)

    def _nothing(self) -> list[Any]:
        """Return arrays in the place of a batch that isn't there."""
        flat = tf.nest.flatten(self.element_spec, expand_composites=True)
        return [
            np.zeros([size or 0 for size in each.shape], each.dtype.as_numpy_dtype)
            for each in flat
        ] * len(self._workers.devices)


class LoopIterator(_tf.DistributedIterator):
    """An iterator over one pass of a loop; in graphs over the pass that is open.

    Args:
        loop: The loop.
        batches: The pass; None in graphs.
    """

    def __init__(self, loop: AsyncLoop, batches: AsyncBatches | None) -> None:
        self._loop = loop
        self._batches = batches

    def __iter__(self) -> LoopIterator:
        return self

    def __next__(self) -> Any:
        if not _tf.executing_eagerly():
            return self._loop.next_or_error()
        batch = self._loop.take()
        if batch is None:
            raise StopIteration
        return batch

    def get_next(self) -> Any:
        """Return the next batch; OutOfRangeError (StopIteration outside of a graph)."""
        return next(self)

    def get_next_as_optional(self) -> _tf.OptionalBatch:
        """Return the next batch, or the fact that there is none."""
        if not _tf.executing_eagerly():
            return _tf.OptionalBatch(*self._loop.next_in_graph())
        batch = self._loop.take()
        return _tf.OptionalBatch(tf.constant(batch is not None), batch)

    @property
    def element_spec(self) -> Any:
        """See `AsyncLoop.element_spec`."""
        return self._loop.element_spec

    def __tf_tracing_type__(self, context: Any) -> Any:
        # A function isn't traced again for each pass.
        return _tf.same_for_all(self._loop._in_graphs)

    def __del__(self) -> None:
        # `break`, or an error in the loop. Nothing may wait here.
        with contextlib.suppress(AttributeError):
            self._loop.leave(self._batches)


def _of_any_rows(spec: Any) -> Any:
    """Return the specification of batches with any number of rows."""
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    return spec
