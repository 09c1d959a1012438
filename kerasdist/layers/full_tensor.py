"""Initializer, regularizer and constraint of a whole matrix, for its parts.

The initial value is drawn once; a regularizer and a constraint must have the same
effect on the parts as on the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

# Sums over entries: the penalty of a matrix is the sum of its parts' penalties.
_SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
_NORMS = (
    keras.constraints.MaxNorm,
    keras.constraints.MinMaxNorm,
    keras.constraints.UnitNorm,
)


@dataclass(frozen=True, kw_only=True)
class ShardSlice:
    """The part of a matrix that is a shard.

    Attributes:
        index: Its number.
        start: Its begin, along the axis that is cut.
        stop: Its end.
    """

    index: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class FullTensor:
    """A matrix or vector that is cut.

    Attributes:
        shape: Its shape.
        axis: The axis along which it's cut.
    """

    shape: tuple[int, ...]
    axis: int

    def shape_of(self, place: ShardSlice) -> tuple[int, ...]:
        """Return the shape of a part."""
        shape = list(self.shape)
        shape[self.axis] = place.stop - place.start
        return tuple(shape)


class WholeValue:
    """The initial value of a matrix, drawn whole and once, handed out in parts.

    So a sharded layer begins with the numbers of a plain one with the same seed. The
    value is drawn in host memory, and dropped when all parts are handed out.

    Args:
        initializer: Keras's initializer, or a function of shape and dtype.
        whole: The matrix.
        parts: The number of its parts.

    Attributes:
        whole: The matrix.
    """

    def __init__(
        self, initializer: Callable[..., Any], whole: FullTensor, parts: int
    ) -> None:
        self.whole = whole
        self._initializer = initializer
        self._parts = parts
        self._missing = parts
        self._drawn: Any = None

    def part(self, place: ShardSlice) -> Callable[..., Any]:
        """Return the initializer of a shard."""

        def initial(shape: Sequence[int], dtype: Any = None) -> Any:
            with tf.device("CPU:0"):
                drawn = self._draw(dtype)
                where = [slice(None)] * len(self.whole.shape)
                where[self.whole.axis] = slice(place.start, place.stop)
                return tf.identity(drawn[tuple(where)])

        return initial

    def _draw(self, dtype: Any) -> Any:
        if not tf.executing_eagerly():
            # A tensor of one graph isn't another's. Keras's initializers draw the
            # same numbers again.
            return tf.convert_to_tensor(
                self._initializer(self.whole.shape, dtype=dtype)
            )
        if self._drawn is None:
            value = self._initializer(self.whole.shape, dtype=dtype)
            self._drawn = tf.convert_to_tensor(value)
            self._missing = self._parts
        drawn = self._drawn
        self._missing -= 1
        if self._missing == 0:
            self._drawn = None
        return drawn


class _OfWhole(keras.regularizers.Regularizer):
    """A regularizer of a whole matrix: its value doesn't depend on the argument.

    A class, because Keras 3.14 accepts no function.
    """

    def __init__(self, regularizer: Any, whole: Callable[[], Any]) -> None:
        self._regularizer = regularizer
        self._of = whole

    def __call__(self, x: Any) -> Any:
        return self._regularizer(self._of())


def regularizer_of(
    regularizer: Any, place: ShardSlice, whole: Callable[[], Any]
) -> Callable[[Any], Any] | None:
    """Return the regularizer of one part's variable, or None.

    Args:
        regularizer: That of the whole matrix, or None.
        place: The part.
        whole: Returns the whole matrix.
    """
    if regularizer is None or type(regularizer) in _SUMS:
        return regularizer
    # Any other may need the whole matrix: the first part's gets all of it.
    return None if place.index else _OfWhole(regularizer, whole)


def check_constraint(constraint: Any, argument: str, axis: int, shards: int) -> None:
    """Check that a constraint on each shard is the constraint on the whole.

    Raises:
        ValueError: It isn't, or that is unknown.
    """
    if constraint is None or shards == 1:
        return
    kind = type(constraint)
    if kind is keras.constraints.NonNeg:
        return
    if kind in _NORMS:
        axes = constraint.axis
        axes = axes if isinstance(axes, (list, tuple)) else [axes]
        if axis not in axes and axis - 2 not in axes:
            return
    raise ValueError(
        f"`{argument}` must treat each shard as it treats the whole. Received: "
        f"{argument}={constraint!r} with {shards} shards along axis {axis}. Expected "
        "NonNeg, or a norm along the other axis: take it, split the layer the other "
        "way, or use one shard."
    )
