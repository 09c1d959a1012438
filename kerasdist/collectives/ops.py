"""The reduction operations, and the dtypes that each is defined on."""

from __future__ import annotations

from typing import Any

import numpy as np

from kerasdist.transport.wire.framing import DTYPES, OPS

Array = np.ndarray[Any, Any]

_REDUCERS: dict[str, np.ufunc] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


def equal_part(length: int, parts: int, index: int, start: int = 0) -> slice:
    """Return the `index`-th of `parts` nearly equal parts of `length` from `start`.

    The first `length % parts` parts are one longer; parts are empty where there are
    more of them than `length`.
    """
    size, longer = divmod(length, parts)
    start += index * size + min(index, longer)
    return slice(start, start + size + (index < longer))


def octets(array: Array) -> memoryview:
    """Return the bytes of a C-contiguous array, which must not be 0-d."""
    return array.reshape(-1).view(np.uint8).data


def itemsize(name: str) -> int:
    """Return the bytes of one element of a checked dtype; 0 for "none"."""
    bits = name.lstrip("abcdefghijklmnopqrstuvwxyz")  # also of bfloat16
    return int(bits) // 8 if bits else int(name == "bool")


def reducer(op: str) -> np.ufunc:
    """Return the element-wise function of a checked op."""
    return _REDUCERS[op]


def check_dtype(dtype: np.dtype[Any]) -> str:
    """Return the dtype's name in messages between ranks.

    Raises:
        TypeError: It isn't a numeric dtype or bool.
    """
    if dtype.name not in DTYPES[1:] or not dtype.isnative:
        raise TypeError(
            "A collective moves arrays of numbers or bools in the machine's byte "
            f"order. Received: dtype={dtype!r}; expected one of {DTYPES[1:]}. Convert "
            "the array first."
        )
    return str(dtype.name)


def check_op(op: str, dtype: np.dtype[Any]) -> None:
    """Check that `op` exists and has a meaning on `dtype`.

    Raises:
        ValueError: There is no such op.
        TypeError: It has no meaning on this dtype.
    """
    if op not in _REDUCERS:
        raise ValueError(
            f"Unknown reduction. Received: op={op!r}; expected one of {OPS[1:]}."
        )
    if dtype.kind == "b" and op in ("sum", "prod"):
        raise TypeError(
            f"{op!r} has no meaning on bool. Received: op={op!r}, dtype=bool. Use "
            "'max' for a logical or, 'min' for a logical and, or convert to an integer "
            "dtype to count."
        )
    if dtype.kind == "c" and op in ("min", "max"):
        raise TypeError(
            f"Complex numbers have no order. Received: op={op!r}, dtype={dtype.name}. "
            "Use 'sum' or 'prod'."
        )


def check_scale(scale: float, op: str, dtype: np.dtype[Any]) -> None:
    """Check that a scale is possible with this operation and dtype.

    Raises:
        TypeError: `dtype` isn't one of numpy's floats.
        ValueError: The op isn't a sum.
    """
    if op != "sum":
        raise ValueError(
            f"A scale is only for sums. Received: scale={scale!r}, op={op!r}. Use "
            "op='sum', or multiply the result."
        )
    if dtype.kind != "f":
        raise TypeError(
            f"Only floats can be scaled. Received: scale={scale!r}, "
            f"dtype={dtype.name}; expected float16, float32 or float64. Convert the "
            "array first."
        )
