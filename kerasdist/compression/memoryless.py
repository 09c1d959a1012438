"""Compressors that keep nothing: 16 bits, and sufficient factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf

from kerasdist.compression.contract import (
    Compressor,
    Memory,
    OuterProducts,
    Payload,
    dense,
)

# Gradients in 16 bits.

_DTYPES = {"bf16": tf.bfloat16, "fp16": tf.float16}


class HalfPrecision(Compressor):
    """Sends gradients in 16 bits: half of the bytes of float32.

    All ranks end with the same bits, but no longer with those of one process. What each
    rank adds should be its part of a mean, so that the sum of all can't overflow.

    Args:
        dtype: "bf16", which keeps the range of float32, or "fp16", which is finer.
    """

    def __init__(self, dtype: str) -> None:
        if dtype not in _DTYPES:
            raise ValueError(
                f"The dtype of `HalfPrecision` must be 'bf16' or 'fp16'. Received: "
                f"dtype={dtype!r}."
            )
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"HalfPrecision({self.dtype!r})"

    def _sum_up(
        self, gradients: Sequence[Any], memory: Memory, payload: Payload
    ) -> tuple[list[Any], Memory]:
        """See `Compressor._sum_up`."""
        given = [dense(gradient) for gradient in gradients]
        sent = [
            tf.cast(tensor, _DTYPES[self.dtype]) if tensor.dtype.is_floating else tensor
            for tensor in given
        ]
        sums = [
            tf.cast(total, tensor.dtype)
            for total, tensor in zip(payload.all_reduce(sent), given, strict=True)
        ]
        return sums, memory


# Sufficient factors.
#
# Zhang et al.: Poseidon, USENIX ATC 2017, section 3.2. The gradient of a `Dense` kernel
# of m x n is the sum of B outer products, of a layer's inputs and the gradients of its
# outputs. Where the B (m + n) numbers of all ranks are fewer than an all-reduce would
# send, they are sent in place of the gradient, and each rank multiplies them.


class Factors(Compressor):
    """Sends the factors of the gradients of matrices where these are fewer bytes.

    Nothing is lost: the sums are those of one process but for rounding. For each step
    and each matrix all ranks choose alike, by the number of rows that they have.
    """

    needs_factors: ClassVar[bool] = True

    def __repr__(self) -> str:
        return "Factors()"

    def _sum_up(
        self, gradients: Sequence[Any], memory: Memory, payload: Payload
    ) -> tuple[list[Any], Memory]:
        """See `Compressor._sum_up`."""
        factored = {
            i: gradient
            for i, gradient in enumerate(gradients)
            if isinstance(gradient, OuterProducts)
        }
        if not factored:
            return payload.all_reduce(gradients), memory
        rows = tf.stack(
            [tf.shape(each.left, tf.int64)[0] for each in factored.values()]
        )
        every = payload.all_gather(rows[tf.newaxis])
        total = tf.unstack(tf.reduce_sum(every, 0), num=len(factored))
        pays = {
            i: number * sum(each.shape) < 2 * each.shape.num_elements()
            for (i, each), number in zip(factored.items(), total, strict=True)
        }

        # What isn't sent in one way is of no rows in the other one, so that the calls
        # are the same in each step.
        def in_full(i: int, gradient: Any) -> Any:
            if i not in factored:
                return gradient
            _, columns = gradient.shape
            return tf.cond(
                pays[i],
                lambda: tf.zeros([0, columns], gradient.dtype),
                gradient.product,
            )

        sums = payload.all_reduce([in_full(i, g) for i, g in enumerate(gradients)])
        for i, gradient in factored.items():
            both = tf.concat([gradient.left, gradient.right], 1)
            both = payload.all_gather(both[: tf.where(pays[i], tf.shape(both)[0], 0)])
            found = OuterProducts(*tf.split(both, gradient.shape.as_list(), axis=1))
            reduced = sums[i]
            total = tf.cond(pays[i], found.product, lambda total=reduced: total)
            # An operation that has the shape, also where a graph is made again.
            sums[i] = tf.ensure_shape(total, gradient.shape)
        return sums, memory
