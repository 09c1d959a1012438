"""PowerSGD: gradients as products of two thin matrices.

Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019, algorithms 1 and 2.

    M = gradient + residual          of this rank, a matrix of m x n
    P = sum over ranks of M Q        m x r, all-reduce
    P = orthogonal columns of P
    R = M' P                         n x r
    Q = sum over ranks of R          all-reduce; the start of the next step (warm start)
    sum = P Q'
    residual = M - P R'              what this rank hasn't sent

All of it is linear in M, so the ranks' sum is compressed as if one rank had it.
"""

from __future__ import annotations

import math
import zlib
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


class PowerSGD(Compressor):
    """Sends each gradient as two thin matrices, with error feedback and warm start.

    A gradient of shape `(..., n)` is a matrix of `n` columns. Gradients with one axis,
    and those that are no larger than the two matrices, are sent as they are.

    Args:
        rank: The number of columns of the thin matrices: more are closer to the
            gradient, and cost more bytes. 2 to 4 for most models.
        error_feedback: Whether what isn't sent in a step is added to the next one.
            Without it training converges worse.

    Raises:
        ValueError: `rank` isn't a positive integer.
    """

    has_memory: ClassVar[bool] = True

    def __init__(self, rank: int = 2, error_feedback: bool = True) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ValueError(
                f"The rank of `PowerSGD` must be a positive integer. Received: "
                f"rank={rank!r}."
            )
        self.rank = rank
        self.error_feedback = error_feedback

    def __repr__(self) -> str:
        more = "" if self.error_feedback else ", error_feedback=False"
        return f"PowerSGD(rank={self.rank}{more})"

    def _matrix(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return the shape of a gradient as a matrix; None: it is sent as it is."""
        if len(shape) < 2 or None in tuple(shape):
            return None
        rows, columns = math.prod(shape[:-1]), int(shape[-1])
        whole = (rows + columns) * self.rank >= rows * columns
        return None if whole else (rows, columns)

    def init(self, shapes: Sequence[Sequence[int]]) -> Memory:
        """See `Compressor.init`: the residual as a matrix, and Q."""
        matrices = map(self._matrix, shapes)
        return [
            () if m is None else (np.zeros(m, np.float32), self._start(m))
            for m in matrices
        ]

    def _start(self, matrix: tuple[int, int]) -> Any:
        """Return the first Q, the same numbers on all ranks."""
        seed = zlib.crc32(repr((matrix, self.rank)).encode())
        start = np.random.default_rng(seed).normal(size=(matrix[1], self.rank))
        return start.astype(np.float32)

    def restart(self, memory: Sequence[Any]) -> tuple[Any, ...]:
        """See `Compressor.restart`: Q begins again."""
        if not memory:
            return ()
        rows, columns = memory[0].shape
        return memory[0], self._start((int(rows), int(columns)))

    def unsent(self, memory: Sequence[Any]) -> Any:
        """See `Compressor.unsent`: the residual."""
        return memory[0] if memory else None

    def _sum_up(
        self, gradients: Sequence[Any], memory: Memory, payload: Payload
    ) -> tuple[list[Any], Memory]:
        """See `Compressor._sum_up`."""
        given = [dense(gradient) for gradient in gradients]
        thin = [i for i, parts in enumerate(memory) if parts]
        whole = [i for i, parts in enumerate(memory) if not parts]
        matrices = {}
        for i in thin:
            residual, _ = memory[i]
            matrix = tf.reshape(tf.cast(given[i], tf.float32), residual.shape)
            matrices[i] = matrix + residual if self.error_feedback else matrix
        # Gradients that are sent whole are in the first of the two calls.
        projected = [tf.matmul(matrices[i], memory[i][1]) for i in thin]
        first = payload.all_reduce([*projected, *(given[i] for i in whole)])
        # QR has orthonormal columns also where the matrix has a lower rank.
        bases = [tf.linalg.qr(total)[0] for total in first[: len(thin)]]
        own = [
            tf.matmul(matrices[i], basis, transpose_a=True)
            for i, basis in zip(thin, bases, strict=True)
        ]
        second = payload.all_reduce(own)

        sums: list[Any] = [None] * len(given)
        for i, total in zip(whole, first[len(thin) :], strict=True):
            sums[i] = total
        after: Memory = list(memory)
        for i, basis, mine, total in zip(thin, bases, own, second, strict=True):
            product = tf.matmul(basis, total, transpose_b=True)
            sums[i] = tf.cast(tf.reshape(product, given[i].shape), given[i].dtype)
            residual, start = memory[i]
            rest = matrices[i] - tf.matmul(basis, mine, transpose_b=True)
            fine = is_finite(total)
            after[i] = (
                tf.where(fine, rest, residual) if self.error_feedback else residual,
                tf.where(fine, total, start),
            )
        return sums, after
