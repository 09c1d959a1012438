"""The weights that asynchronous workers train together, at the servers.

    w: this worker's weights     b: those last received     T: the servers' table

    1. step        an optimizer of Keras changes w
    2. push        w - b is sent to the servers, which add it to T
                   (parameter_server/tables.py)
    3. the answer  is T with all changes so far: b = w = T

That is one operation at the end of `Optimizer.apply`, in whatever graph that runs, and
once per window of gradient accumulation. So any optimizer works, with clipping, decay
and averages: each worker has its own, with its own state.

Of embeddings only rows are sent (`strategies.asynchronous.weights`).

At ends of epochs all workers meet, when all changes are in T, and take T. A change of
the weights between two epochs isn't a step, and N workers would push it N times: so
all take rank 0's weights (`SharedTables.rebase`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from kerasdist._tf.variables import share_reads
from kerasdist.collectives.fused_buffer import BufferPool
from kerasdist.collectives.row_exchange import Array
from kerasdist.parameter_server import Change, Pulled, Rows, Variable
from kerasdist.parameter_server.channel import body_views, spans
from kerasdist.strategies.asynchronous.live_group import AsyncWorkers

# An embedding that asynchronous workers train together: only rows are sent.
#
#     w: this worker's table     b: its last received rows     T: the servers' table
#
#     1. step        an optimizer of Keras changes some rows of w
#     2. push        w[i] - b[i] of these rows i
#     3. the answer  the rows of T that any push has changed since the last answer: they
#                    are put into w and into b
#
# The rows i that a step has changed are the indices of the gradient's slices, if the
# optimizer changes no others (`kerasdist._keras.training.optimizers`). Otherwise w
# is compared with b: that reads the whole table, but sends only the rows that differ.
# In both cases there is one copy of the table, b, and none is made in a step.
#
# Rows that are changed within an epoch by anything but an optimizer aren't found in the
# first case; at ends of epochs (`restore`) they are reset to the servers' values.

# This many bytes are compared at once, so that they stay in the caches.
_BLOCK_BYTES = 256 << 10


class SharedRows:
    """A sparse variable of a table.

    Args:
        copies: The variable on each of this worker's devices.
        base: The variable's value at the servers, of its shape and dtype. This object
            owns it from now on.
        held: The dtype in which servers hold it.
    """

    def __init__(self, copies: Sequence[Any], base: Array, held: str) -> None:
        self._copies = copies
        self._base = base
        self._held = np.dtype(held)

    def read(self, touched: Any) -> list[Any]:
        """Return tensors from which `change` makes a step's change, in any context.

        Args:
            touched: Indices of all rows that may have changed, an integer tensor; or
                None if they aren't known.
        """
        variable = self._copies[0]
        with tf.device(variable.device):
            if touched is None:
                return [variable.read_value()]
            indices, _ = tf.unique(tf.reshape(touched, [-1]))
            return [indices, variable.sparse_read(indices)]

    def change(self, arrays: Sequence[Array]) -> Rows:
        """Return the difference between the changed rows and those last received.

        Args:
            arrays: The values of the tensors of `read`.
        """
        if len(arrays) == 1:
            indices: npt.NDArray[Any] = rows_that_differ(arrays[0], self._base)
            values = arrays[0][indices]
        else:
            indices, values = arrays
        with np.errstate(all="ignore"):  # NaN is the model's own concern
            before = self._base[indices].astype(self._held)
            return Rows(indices, np.subtract(values, before, dtype=self._held))

    def take(self, rows: Rows) -> list[Array]:
        """Store rows that were received; return indices and rows for `assign`."""
        self._base[rows.indices] = rows.values
        return [np.asarray(rows.indices, np.int64), rows.values]

    def assign(self, indices: Any, rows: Any) -> None:
        """Put rows into the variable, in any context."""
        for variable in self._copies:
            with tf.device(variable.device):
                variable.scatter_update(tf.IndexedSlices(rows, indices))
                share_reads(variable)

    def differing(self) -> npt.NDArray[np.int64]:
        """Return the indices of the rows that differ from those last received."""
        return rows_that_differ(np.asarray(self._copies[0]), self._base)

    def restore(self) -> None:
        """Reset all rows to those last received."""
        indices = self.differing()
        if indices.size:
            self.assign(tf.constant(indices), tf.constant(self._base[indices]))


def rows_that_differ(value: Array, base: Array) -> npt.NDArray[np.int64]:
    """Return the increasing indices of rows that differ in a bit.

    Args:
        value: Of shape `(rows, ...)`.
        base: Of the same shape and dtype.
    """
    # Bits, since NaN differs from itself; in large words, of which there are fewer.
    mine, theirs = _words(value), _words(base)
    rows, row_bytes = mine.shape[0], mine.shape[1] * mine.itemsize
    step = max(1, _BLOCK_BYTES // max(1, row_bytes))
    found = [np.empty(0, np.int64)]
    for start in range(0, rows, step):
        different = mine[start : start + step] != theirs[start : start + step]
        if different.any():
            found.append(np.flatnonzero(different.any(axis=1)) + start)
    return np.concatenate(found)


def _words(array: Array) -> npt.NDArray[Any]:
    flat = np.ascontiguousarray(array)
    rows = flat.shape[0]
    row_bytes = flat.nbytes // rows if rows else 0
    if not row_bytes:
        return np.empty((rows, 0), np.uint8)
    size = next(size for size in (8, 4, 2, 1) if row_bytes % size == 0)
    octets = flat.reshape(-1).view(np.uint8).reshape(rows, row_bytes)
    return octets.view(f"u{size}")


# Of smaller variables all rows are sent: the message isn't longer for it.
_LEAST_SPARSE_BYTES = 64 << 10


class SharedWeights:
    """The variables of one table, with the values that were last received.

    Opened by all workers at the same point, or by each at its first step.

    Args:
        workers: The workers that train them.
        variables: Trainable variables, of float dtypes.
        sparse: For each of them whether few of its rows change in a step; the same on
            all workers.
        note_updates: Is called with this and the number of all workers' updates that
            this worker knows of.
        values: Their values before this worker's first step; None: the present ones.
        together: Whether all workers open it at the same point.
    """

    def __init__(
        self,
        workers: AsyncWorkers,
        variables: Sequence[Any],
        sparse: Sequence[bool],
        note_updates: Callable[[SharedWeights, Any], None],
        values: Sequence[Array] | None = None,
        together: bool = True,
    ) -> None:
        self._workers = workers
        self._note_updates = note_updates
        self._copies = [workers.copies(v) for v in variables]
        # They are identified by their ids, so they must stay alive.
        self._variables = list(variables)
        self.keys = [key_of(variable) for variable in variables]
        own = list(values or [np.asarray(parts[0]) for parts in self._copies])
        held = [
            Variable(
                name=v.name,
                shape=tuple(v.shape),
                dtype=v.dtype.name,
                sparse=few and array.ndim > 0 and array.nbytes >= _LEAST_SPARSE_BYTES,
            )
            for v, array, few in zip(variables, own, sparse, strict=True)
        ]
        self._base = {
            index: np.array(array)
            for index, (array, variable) in enumerate(zip(own, held, strict=True))
            if not variable.sparse
        }
        self.table = workers.client.open_table(held, own, together=together)
        del own  # the variables' memory: holding it would force copies
        first, self.table.initial = self.table.initial, []
        self._rows = {
            index: SharedRows(self._copies[index], first[index], variable.held)
            for index, variable in enumerate(held)
            if variable.sparse
        }
        # Rows that no worker changes from now on won't be sent.
        for part in self._rows.values():
            part.restore()
        self._buffers = BufferPool()
        self._specs = [(base.dtype.name, base.shape) for base in self._base.values()]
        # Whether anything was pushed, or read, since all workers had the same values.
        self.dirty = False

    def exchange(self, touched: Mapping[int, Any]) -> None:
        """Push the changes, and take the servers' values; in any context.

        Args:
            touched: By the key of a variable the indices of its rows that may have
                changed; those of other variables aren't known.
        """
        workers = self._workers
        with tf.device(workers.host):
            values = [
                tf.convert_to_tensor(self._copies[index][0].read_value())
                for index in self._base
            ]
            rows = [
                [tf.identity(t) for t in part.read(touched.get(self.keys[index]))]
                for index, part in self._rows.items()
            ]
        like = [*values]
        for index in self._rows:
            variable = self._copies[index][0]
            part = tf.TensorSpec([None, *variable.shape[1:]], variable.dtype)
            like += [tf.TensorSpec([None], tf.int64), part]

        def push(*arrays: Array) -> list[Any]:
            rest = iter(arrays[len(values) :])
            some = [[next(rest) for _ in tensors] for tensors in rows]
            return [*self.push_values(arrays[: len(values)], some), self.updates]

        *results, updates = workers.ops.call(
            push,
            [*values, *(tensor for tensors in rows for tensor in tensors)],
            [*like, tf.TensorSpec([], tf.int64)],
        )
        self.assign(results)
        self._note_updates(self, updates)

    @property
    def updates(self) -> np.int64:
        """The number of all workers' updates that this worker knows of."""
        return np.int64(self.table.updates)

    def push_values(
        self, values: Sequence[Array], rows: Sequence[Sequence[Array]] = ()
    ) -> list[Array]:
        """Push the changes to these values; return the servers', for `assign`.

        Args:
            values: Of the dense variables.
            rows: For each of the others what `SharedRows.read` returns.
        """
        self.dirty = True
        changes: dict[int, Change | Rows] = {
            index: Change(value, base)
            for (index, base), value in zip(self._base.items(), values, strict=True)
        }
        for (index, part), arrays in zip(self._rows.items(), rows, strict=True):
            changes[index] = part.change(arrays)
        # In the order of the table's variables.
        ordered = [changes[index] for index in range(len(self.keys))]
        return self._take(self.table.push_pull(ordered))

    def changed(self) -> bool:
        """Return whether the weights were changed by anything but a step."""
        return any(
            not np.array_equal(np.asarray(self._copies[index][0]), base)
            for index, base in self._base.items()
        ) or any(part.differing().size for part in self._rows.values())

    def push(self) -> None:
        """Push this worker's change; the values received aren't assigned."""
        own = [np.asarray(parts[0]) for parts in self._copies]
        self.push_values(
            [own[index] for index in self._base], [[own[index]] for index in self._rows]
        )

    def pull(self) -> None:
        """Take the servers' values."""
        self.assign([tf.convert_to_tensor(v) for v in self._take(self.table.pull())])
        for part in self._rows.values():
            part.restore()
        self._note_updates(self, self.table.updates)
        self.dirty = False

    def _take(self, pulled: Pulled) -> list[Array]:
        """Copy received values into the base, and into arrays for TensorFlow.

        One array can't serve as both: optimizers change variables in place.
        """
        memory = self._buffers.empty(spans(self._specs)[1], np.dtype(np.uint8))
        # TensorFlow uses arrays that are aligned as these are without copying them.
        taken = body_views(memory, self._specs)
        for (index, base), out in zip(self._base.items(), taken, strict=True):
            value = pulled.values[index]
            if value is None:
                raise TypeError("A dense variable was received as rows.")
            np.copyto(base, value)
            np.copyto(out, value)
        for index, part in self._rows.items():
            taken += part.take(pulled.rows[index])
        return taken

    def assign(self, values: Sequence[Any]) -> None:
        """Assign values that were received, in any context."""
        rest = iter(values)
        for index in self._base:
            value = next(rest)
            for part in self._copies[index]:
                part.assign(value)
        for part in self._rows.values():
            part.assign(next(rest), next(rest))


def key_of(variable: Any) -> int:
    """Return the key of a variable or of one of its copies."""
    if hasattr(variable, "_distributed_container"):
        variable = variable._distributed_container()
    return id(variable)
