"""Collectives on tensors: from a TensorFlow graph to a communicator and back.

In a graph a collective is one `tf.numpy_function`: TensorFlow passes the tensors
without copying and continues with all operations that don't depend on them. All
ranks must run their collectives in the same order, which a graph doesn't guarantee.
But TensorFlow runs operations on a variable in the order of the program, also in nested
functions, branches and loops. So each collective

    1. adds one to a counter variable, and waits for the result,
    2. runs,
    3. reads the counter: the next one to add to it waits for that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist._tf.graph_clocks import COLLECTIVE
from kerasdist.collectives import Communicator
from kerasdist.collectives.row_exchange import Slices
from kerasdist.strategies.options import StrategyJob


class CollectiveOps:
    """Collectives between workers, on host tensors, in graphs and eagerly.

    Args:
        communicator: The communicator of the workers.
        host: The CPU device of this process.

    Attributes:
        communicator: See above.
        waited: Called with the seconds of each collective that a forward or backward
            pass waits for; None: they aren't counted.
    """

    def __init__(self, communicator: Communicator, host: str) -> None:
        self.communicator = communicator
        self._host = host
        self.waited: Callable[[float], None] | None = None
        self._is_awaited = False
        with tf.init_scope(), tf.device(host):
            self._counter = tf.Variable(
                0, dtype=tf.int64, trainable=False, name="kerasdist_collectives"
            )

    def all_reduce(
        self, tensors: Sequence[Any], op: str = "sum", *, step: bool = False
    ) -> list[Any]:
        """Reduce each tensor over the workers; dtypes and shapes are kept.

        Args:
            tensors: Host tensors.
            op: One of the communicator's operations.
            step: Whether an optimizer step begins with it.
        """
        # Arrays of eager code belong to that code, so buffers aren't lent.
        lend = not tf.executing_eagerly()

        def reduce(*arrays: Any) -> list[Any]:
            self.communicator.step += step
            return self.communicator.all_reduce(arrays, op, lend=lend)

        return self.call(reduce, tensors, tensors)

    def all_gather(self, tensor: Any, axis: int = 0) -> Any:
        """Concatenate the workers' tensors along `axis`, in rank order."""

        def gather(array: Any) -> list[Any]:
            rows = np.moveaxis(array, axis, 0)
            parts = self.communicator.all_gather(rows)
            return [np.ascontiguousarray(np.moveaxis(np.concatenate(parts), 0, axis))]

        shape = tensor.shape.as_list()
        shape[axis] = None
        return self.call(gather, [tensor], [tf.TensorSpec(shape, tensor.dtype)])[0]

    def broadcast(self, tensor: Any) -> Any:
        """Give every worker the chief's tensor; strings and the like stay unchanged.

        A tensor of a dtype that can't be sent must be the same on all workers already.
        """
        if not (
            tensor.dtype.is_floating
            or tensor.dtype.is_integer
            or (tensor.dtype in (tf.bool, tf.complex64, tf.complex128))
        ):
            return tensor

        def give(array: Any) -> list[Any]:
            return self.communicator.broadcast([array])

        return self.call(give, [tensor], [tensor])[0]

    def sum_gradients(
        self,
        gradients: Sequence[Any],
        there: Any,
        *,
        beside: Sequence[Any] = (),
        step: bool = False,
    ) -> list[Any]:
        """Return the sums of gradients over the workers.

        Sums are computed in float32 for gradients of 16 bits.

        Args:
            gradients: Host tensors of float dtypes.
            there: 1; or 0 for a worker that adds nothing. A scalar integer tensor.
            beside: Host tensors whose sums are returned after the gradients'.
            step: Whether an optimizer step begins with it.
        """
        # Arrays of eager code belong to that code, so buffers aren't lent.
        lend = not tf.executing_eagerly()

        def reduce(present: Any, *arrays: Any) -> list[Any]:
            self.communicator.step += step
            given = arrays[: len(gradients)]
            wide = [np.promote_types(each.dtype, np.float32) for each in given]
            sums = self.communicator.all_reduce(
                [*map(_as_dtype, given, wide), *arrays[len(gradients) :]],
                scale=float(bool(present)),
                unscaled=len(beside),
                lend=lend,
            )
            found = map(_as_dtype, sums, [each.dtype for each in given])
            # Copies: a lent memory is used again when nothing of it is held any more.
            return [*found, *map(np.array, sums[len(gradients) :])]

        sent = [*gradients, *beside]
        return self.call(reduce, [there, *sent], sent)

    def all_reduce_in_host(self, tensors: Sequence[Any]) -> list[Any]:
        """Sum each tensor over this host's workers; dtypes and shapes are kept."""
        within = self.communicator.within_host
        if within is None:
            return list(tensors)

        def reduce(*arrays: Any) -> list[Any]:
            return within.all_reduce(arrays)

        return self.call(reduce, tensors, tensors)

    def exchange_rows(
        self,
        tables: Sequence[Any],
        there: Any = None,
        *,
        once: Sequence[Any] = (),
        dense: Sequence[Any] = (),
        beside: Sequence[Any] = (),
        step: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """Give all workers' slices to all, and reduce small tensors with them.

        Args:
            tables: IndexedSlices, host tensors, one for each table.
            there: See `sum_gradients`; it holds for slices, too. None: 1.
            once: For each table whether no index occurs twice; then it may be summed
                as a whole. Empty: no table may be.
            dense: Small host tensors of float dtypes, which are summed.
            beside: See `sum_gradients`; small ones.
            step: Whether an optimizer step begins with it.

        Returns:
            IndexedSlices, the workers' in rank order; then sums.
        """
        weights = [] if there is None else [there]
        may = [
            tf.where(one, tf.cast(table.dense_shape[0], tf.int64), 0)
            for one, table in zip(once, tables, strict=False)
        ]
        arguments = [
            *weights,
            *(table.values for table in tables),
            *(table.indices for table in tables),
            *may,
            *dense,
            *beside,
        ]
        # Arrays of eager code belong to that code, so buffers aren't lent.
        lend = not tf.executing_eagerly()
        count = len(tables)

        def exchange(*arrays: Any) -> list[Any]:
            self.communicator.step += step
            given = iter(arrays)
            numbers = [(int(next(given)), 1) for _ in weights]
            values, indices = ([next(given) for _ in range(count)] for _ in range(2))
            whole = [int(next(given)) for _ in may] or [0] * count
            return self.communicator.exchange_rows(
                [Slices(*t) for t in zip(values, indices, whole, strict=True)],
                *(numbers[0] if numbers else ()),
                means=[next(given) for _ in dense],
                sums=list(given),
                lend=lend,
            )

        sent = [part for table in tables for part in (table.values, table.indices)]
        like = [tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in sent]
        results = self.call(exchange, arguments, [*like, *dense, *beside])
        slices = [
            tf.IndexedSlices(*results[2 * i : 2 * i + 2], table.dense_shape)
            for i, table in enumerate(tables)
        ]
        return slices, results[2 * count :]

    def reduce_replicas(
        self, values: Sequence[Sequence[Any]], *, step: bool = False
    ) -> list[list[Any]] | None:
        """Sum over all replicas at once where that is supported; here it isn't."""
        del values, step
        return None

    def add_replicas(self, values: Sequence[Sequence[Any]]) -> list[Any]:
        """Add each value's tensors, one per replica of this worker, on the host."""
        with tf.device(self._host):
            return [tf.add_n(list(value)) for value in values]

    def awaited(self) -> contextlib.AbstractContextManager[None]:
        """Count the collectives of the block as those that a pass waits for."""
        return _tf.replaced(self, _is_awaited=True)

    def _counted(self, function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        waited = self.waited
        if waited is None or not self._is_awaited:
            return function

        def counted(*arrays: Any) -> list[Any]:
            begin = time.monotonic()
            try:
                return function(*arrays)
            finally:
                waited(time.monotonic() - begin)

        return counted

    def failure(self, error: Exception) -> Exception | None:
        """Return the job's failure behind TensorFlow's `error`, or None."""
        del error
        return self.communicator.failure

    def call(
        self,
        function: Callable[..., list[Any]],
        tensors: Sequence[Any],
        like: Sequence[Any],
    ) -> list[Any]:
        """Run a function of numpy arrays that communicates, in the common order.

        Args:
            function: Takes one array per tensor, returns a list of at least one.
            tensors: Its arguments.
            like: Tensors, or their specifications, of its results' dtypes and shapes.

        Raises:
            ValueError: XLA would compile it.
        """
        function = self._counted(function)
        if tf.executing_eagerly():
            results = function(*[tensor.numpy() for tensor in tensors])
            return [
                tf.convert_to_tensor(r, each.dtype)
                for r, each in zip(results, like, strict=True)
            ]

        if _tf.in_xla():
            raise ValueError(
                "XLA can't compile communication with other workers. Received: "
                "`strategy.run`, or a reduction, inside of "
                "`tf.function(jit_compile=True)`. Remove jit_compile=True there; a "
                "function inside of the step that doesn't communicate may have it."
            )

        def numbered(number: Any, *arrays: Any) -> list[Any]:
            del number
            return function(*arrays)

        with _tf.outside_of_xla(), tf.device(self._host):
            number = self._counter.assign_add(1, read_value=True)
            results = tf.numpy_function(
                numbered,
                [number, *tensors],
                [each.dtype for each in like],
                name=COLLECTIVE,
            )
            self._hold_back(results)
        for result, each in zip(results, like, strict=True):
            result.set_shape(each.shape)
        return list(results)

    def _hold_back(self, results: Sequence[Any]) -> None:
        """Make the next collective wait for a collective's results."""
        with tf.control_dependencies(results):
            self._counter.read_value()


def _as_dtype(array: Any, dtype: Any) -> Any:
    return array.astype(dtype, copy=False)


def make_ops(job: StrategyJob, devices: Sequence[str]) -> CollectiveOps:
    """Return a job's collectives on tensors of these devices' host."""
    return CollectiveOps(job.communicator, _tf.host_of(devices[0]))
