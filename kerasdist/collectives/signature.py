"""The signature of an all-reduce, the same on all ranks: its dtypes and shapes.

A training loop reduces the same shapes in each step. So the checks, the groups by dtype
and the checksum of a list of buffers are found once and kept (numpy needs several
microseconds for the name of a dtype alone).
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from kerasdist.collectives.ops import Array, check_dtype, check_op, check_scale

# Dtypes and shapes of buffers, in messages and in checksums.
Shapes = Sequence[tuple[str, tuple[int, ...]]]
# More different calls than this aren't a training loop's.
MOST_SIGNATURES = 256


def checksum(shapes: Shapes) -> int:
    """Return a checksum of dtypes and shapes that is the same in every process."""
    return zlib.crc32(repr(list(shapes)).encode())


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """The buffers of an all-reduce, checked.

    Attributes:
        shapes: Names of dtypes, and shapes.
        checksum: Their checksum.
        groups: For each dtype, in the order of names: its name, the indices of its
            buffers, and how many of these are scaled, the first ones.
    """

    shapes: Shapes
    checksum: int
    groups: tuple[tuple[str, tuple[int, ...], int], ...]


class Signatures:
    """The signatures of the calls so far."""

    def __init__(self) -> None:
        self._known: dict[Any, Signature] = {}

    def of(
        self,
        arrays: Sequence[Array],
        op: str,
        scale: float | None,
        unscaled: int,
        lend: bool,
    ) -> Signature:
        """Return the signature of a call, with the arguments of `all_reduce`.

        Raises:
            TypeError, ValueError: One of them is wrong.
        """
        described = [(array.dtype, array.shape) for array in arrays]
        key = (op, scale is None, unscaled, lend, *described)
        found = self._known.get(key)
        if found is None:
            found = _make(described, op, scale, unscaled, lend)
            if len(self._known) >= MOST_SIGNATURES:
                self._known.clear()
            self._known[key] = found
        return found


def _make(
    described: Sequence[tuple[np.dtype[Any], tuple[int, ...]]],
    op: str,
    scale: float | None,
    unscaled: int,
    lend: bool,
) -> Signature:
    first = len(described) - unscaled
    groups: dict[str, list[int]] = {}
    for index, (dtype, _) in enumerate(described):
        check_op(op, dtype)
        groups.setdefault(check_dtype(dtype), []).append(index)
        if scale is not None and index < first:
            check_scale(scale, op, dtype)
    check_op(op, np.dtype("float32"))
    # Every group's fingerprint has the shapes of all: a difference is noticed at once
    # and not a group later.
    shapes = [(dtype.name, shape) for dtype, shape in described]
    if lend:
        shapes.append(("lent", ()))
    return Signature(
        tuple(shapes),
        checksum(shapes),
        tuple(
            (name, tuple(groups[name]), sum(i < first for i in groups[name]))
            for name in sorted(groups)
        )
        or (("none", (), 0),),
    )
