"""The contract of compressors.

One contract test suite, `tests/compression/test_contract.py`, runs on all of them.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import tensorflow as tf

# For each gradient the arrays that a compressor keeps from one step to the next.
Memory = list[tuple[Any, ...]]
# Sums each of a list of tensors over all ranks; shapes and dtypes are kept.
AllReduce = Callable[[Sequence[Any]], list[Any]]
# Concatenates all ranks' tensors along the first axis, in rank order.
AllGather = Callable[[Any], Any]


class OuterProducts(NamedTuple):
    """A gradient of shape `(m, n)` as the sum of the outer products of rows.

    Attributes:
        left: A tensor of shape `(rows, m)`: a layer's inputs.
        right: A tensor of shape `(rows, n)`: the gradients of its outputs.
    """

    left: Any
    right: Any

    @property
    def shape(self) -> tf.TensorShape:
        """The gradient's shape."""
        return tf.TensorShape([self.left.shape[1], self.right.shape[1]])

    @property
    def dtype(self) -> Any:
        """The gradient's dtype."""
        return self.right.dtype

    def product(self) -> Any:
        """Return the gradient."""
        return tf.matmul(self.left, self.right, transpose_a=True)


class Compressor(abc.ABC):
    """A way to sum gradients over all ranks with fewer bytes.

    All ranks call `reduce` alike: with gradients of the same shapes and dtypes, in the
    same order. A compressor has parameters, and no state.

    Attributes:
        has_memory: Whether something is kept from one step to the next.
        needs_factors: Whether gradients of matrices are wanted as `OuterProducts`,
            where they are known to be that.
        is_sparse: Whether what is sent grows with the number of ranks: then those of a
            host add up their gradients before, and one of them sends.
    """

    has_memory: ClassVar[bool] = False
    is_sparse: ClassVar[bool] = False
    needs_factors: ClassVar[bool] = False

    def init(self, shapes: Sequence[Sequence[int]]) -> Memory:
        """Return the memory before the first step, the same on all ranks.

        Args:
            shapes: The shapes of the gradients.

        Returns:
            For each gradient a tuple of float32 arrays.
        """
        return [() for _ in shapes]

    def restart(self, memory: Sequence[Any]) -> tuple[Any, ...]:
        """Return the memory of one gradient for a step with other ranks than before.

        What is the same on all ranks begins again, because new ranks don't have it.

        Args:
            memory: Arrays, as in a tuple of `init`.
        """
        return tuple(memory)

    def unsent(self, memory: Sequence[Any]) -> Any:
        """Return what this rank hasn't sent yet of one gradient; None: nothing is kept.

        Args:
            memory: Arrays, as in a tuple of `init`.
        """
        del memory
        return None

    def reduce(
        self,
        gradients: Sequence[Any],
        memory: Memory,
        all_reduce: AllReduce,
        all_gather: AllGather,
    ) -> tuple[list[Any], Memory, Any]:
        """Sum gradients over all ranks.

        Args:
            gradients: Dense tensors, or `OuterProducts`: this rank's parts of the sums.
                A rank without rows has zeros.
            memory: What `init` or the last call returned.
            all_reduce: Sums each of a list of tensors over all ranks.
            all_gather: Concatenates all ranks' tensors along the first axis.

        Returns:
            The sums, of the gradients' shapes and dtypes, the same on all ranks; the
            memory for the next call; and the bytes that this rank gave to the two
            functions, an int, or a scalar tensor where shapes aren't known.

            A sum that isn't finite on one rank isn't on all, and leaves the memory of
            that gradient as it is: the step is repeated or skipped.
        """
        payload = Payload(all_reduce, all_gather)
        sums, after = self._sum_up(gradients, memory, payload)
        return sums, after, payload.bytes

    @abc.abstractmethod
    def _sum_up(
        self, gradients: Sequence[Any], memory: Memory, payload: Payload
    ) -> tuple[list[Any], Memory]:
        """Return the sums, and the memory for the next call, as `reduce`.

        Args:
            gradients: As there.
            memory: As there.
            payload: Sums and concatenates tensors over all ranks.
        """


class Payload:
    """Counts the bytes that are given to `all_reduce` and `all_gather`."""

    def __init__(self, all_reduce: AllReduce, all_gather: AllGather) -> None:
        self._all_reduce = all_reduce
        self._all_gather = all_gather
        self.bytes: Any = 0

    def all_reduce(self, tensors: Sequence[Any]) -> list[Any]:
        """Sum tensors; none are no call."""
        if not tensors:
            return []
        for tensor in tensors:
            self._add(tensor)
        return list(self._all_reduce(tensors))

    def all_gather(self, tensor: Any) -> Any:
        """Concatenate all ranks' tensors."""
        self._add(tensor)
        return self._all_gather(tensor)

    def _add(self, tensor: Any) -> None:
        elements = tensor.shape.num_elements()
        if elements is None:
            elements = tf.size(tensor, out_type=tf.int64)
        self.bytes += elements * tensor.dtype.size


def dense(gradient: Any) -> Any:
    """Return a gradient as one tensor."""
    if isinstance(gradient, OuterProducts):
        return gradient.product()
    return tf.convert_to_tensor(gradient)


def is_finite(tensor: Any) -> Any:
    """Return whether all elements are finite, as a scalar."""
    return tf.reduce_all(tf.math.is_finite(tensor))
