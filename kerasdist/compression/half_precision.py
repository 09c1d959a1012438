"""Gradients in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kerasdist.compression.contract import (
    AllGather,
    AllReduce,
    Compressor,
    Memory,
    Payload,
    dense,
)

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

    def reduce(
        self,
        gradients: Sequence[Any],
        memory: Memory,
        all_reduce: AllReduce,
        all_gather: AllGather,
    ) -> tuple[list[Any], Memory, Any]:
        """See `Compressor.reduce`."""
        payload = Payload(all_reduce, all_gather)
        given = [dense(gradient) for gradient in gradients]
        sent = [
            tf.cast(tensor, _DTYPES[self.dtype]) if tensor.dtype.is_floating else tensor
            for tensor in given
        ]
        sums = [
            tf.cast(total, tensor.dtype)
            for total, tensor in zip(payload.all_reduce(sent), given, strict=True)
        ]
        return sums, memory, payload.bytes
