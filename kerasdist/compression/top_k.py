"""Top-k: the largest elements of each gradient; the others are kept for later.

Lin et al.: Deep Gradient Compression, ICLR 2018: momentum correction (section 3.1),
momentum factor masking (3.2).

    u = momentum * u + g             with Nesterov: u = momentum * (u + g)
    v = v + u                        with Nesterov: v = v + u + g
    send the elements of v that are largest by absolute value; there u = 0 and v = 0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from kerasdist.compression.contract import (
    Compressor,
    Memory,
    Payload,
    dense,
    is_finite,
)


class TopK(Compressor):
    """Sends the largest elements of each gradient, with their places.

    What isn't sent is added to the next step's gradient. Gradients with one axis, and
    those of which a half or more would be sent, are sent whole.

    Args:
        ratio: The part of a gradient's elements that each rank sends, at most 1; of the
            workers of one host, if there are several hosts, one sends for all.
        momentum: The momentum of the optimizer, which then has none itself: a momentum
            that is applied after the sum would count delayed elements wrongly.
        nesterov: Whether it is Nesterov's.

    Raises:
        ValueError: `ratio` or `momentum` is out of its range.
    """

    has_memory: ClassVar[bool] = True
    is_sparse: ClassVar[bool] = True

    def __init__(
        self, ratio: float = 0.001, momentum: float = 0.0, nesterov: bool = False
    ) -> None:
        if not isinstance(ratio, int | float) or not 0 < ratio <= 1:
            raise ValueError(
                "The ratio of `TopK` is the part of elements that is sent, above 0 and "
                f"at most 1. Received: ratio={ratio!r}."
            )
        if not isinstance(momentum, int | float) or not 0 <= momentum < 1:
            raise ValueError(
                "The momentum of `TopK` must be at least 0, and below 1. Received: "
                f"momentum={momentum!r}."
            )
        self.ratio = ratio
        self.momentum = momentum
        self.nesterov = nesterov

    def __repr__(self) -> str:
        more = f", momentum={self.momentum}" if self.momentum else ""
        more += ", nesterov=True" if self.nesterov else ""
        return f"TopK(ratio={self.ratio}{more})"

    def _count(self, shape: Sequence[int]) -> int | None:
        """Return how many elements are sent; None: all of them."""
        if len(shape) < 2 or None in tuple(shape):
            return None
        count = max(1, math.ceil(self.ratio * math.prod(shape)))
        # An element that is sent by itself needs its place, too.
        return None if 2 * count >= math.prod(shape) else count

    def init(self, shapes: Sequence[Sequence[int]]) -> Memory:
        """See `Compressor.init`: u, if there is momentum; and v, if not all is sent."""
        return [
            tuple(
                np.zeros(math.prod(shape), np.float32)
                for needed in (self.momentum > 0, self._count(shape) is not None)
                if needed and None not in tuple(shape)
            )
            for shape in shapes
        ]

    def unsent(self, memory: Sequence[Any]) -> Any:
        """See `Compressor.unsent`: v."""
        return memory[-1] if len(memory) > (self.momentum > 0) else None

    def _sum_up(
        self, gradients: Sequence[Any], memory: Memory, payload: Payload
    ) -> tuple[list[Any], Memory]:
        """See `Compressor._sum_up`."""
        given = [dense(gradient) for gradient in gradients]
        counts = [self._count(tensor.shape) for tensor in given]
        flat = [tf.reshape(tf.cast(tensor, tf.float32), [-1]) for tensor in given]
        # u and v of each.
        added = [self._add(*each) for each in zip(flat, memory, counts, strict=True)]
        accumulated = [v for _, v in added]
        sparse = [i for i, count in enumerate(counts) if count is not None]
        whole = [i for i, count in enumerate(counts) if count is None]

        sums: list[Any] = [None] * len(given)
        totals = payload.all_reduce([accumulated[i] for i in whole])
        for i, total in zip(whole, totals, strict=True):
            sums[i] = total
        places = {
            i: tf.math.top_k(tf.abs(accumulated[i]), counts[i], sorted=False).indices
            for i in sparse
        }
        if sparse:
            # One call for all of them: values, and places as the bits of floats.
            values = tf.concat(
                [tf.gather(accumulated[i], places[i]) for i in sparse], 0
            )
            bits = tf.bitcast(tf.concat([places[i] for i in sparse], 0), tf.float32)
            pairs = payload.all_gather(tf.stack([values, bits], 1)[tf.newaxis])
            split = tf.split(pairs, [counts[i] for i in sparse], axis=1)
            for i, part in zip(sparse, split, strict=True):
                sums[i] = tf.math.unsorted_segment_sum(
                    tf.reshape(part[:, :, 0], [-1]),
                    tf.bitcast(tf.reshape(part[:, :, 1], [-1]), tf.int32),
                    math.prod(given[i].shape),
                )
        after = [
            self._keep(sums[i], memory[i], *added[i], places.get(i))
            for i in range(len(given))
        ]
        results = [
            tf.cast(tf.reshape(total, tensor.shape), tensor.dtype)
            for total, tensor in zip(sums, given, strict=True)
        ]
        return results, after

    def _add(
        self, gradient: Any, parts: tuple[Any, ...], count: int | None
    ) -> tuple[Any, Any]:
        """Return u, or None without momentum; and v, which includes the gradient."""
        velocity, added = None, gradient
        if self.momentum and parts:
            if self.nesterov:
                velocity = self.momentum * (parts[0] + gradient)
                added = velocity + gradient
            else:
                velocity = added = self.momentum * parts[0] + gradient
        if count is not None:
            added = parts[-1] + added
        return velocity, added

    def _keep(
        self,
        total: Any,
        before: tuple[Any, ...],
        velocity: Any,
        accumulated: Any,
        places: Any,
    ) -> tuple[Any, ...]:
        """Return the memory of a gradient after its step."""
        fine = is_finite(total)
        after = []
        if places is not None:
            sent = tf.scatter_nd(
                places[:, tf.newaxis], tf.ones_like(places, tf.bool), tf.shape(total)
            )
            zero = tf.zeros_like(accumulated)
            accumulated = tf.where(sent, zero, accumulated)
            if velocity is not None:
                velocity = tf.where(sent, zero, velocity)
        if velocity is not None:
            after.append(velocity)
        if places is not None:
            after.append(accumulated)
        return tuple(
            tf.where(fine, new, old) for new, old in zip(after, before, strict=True)
        )
