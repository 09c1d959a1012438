"""The chief's arrays on all workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kerasdist.collectives import Communicator
from kerasdist.strategies.chief_data.encoding import (
    Encoded,
    as_dtype,
    decode,
    describe,
    pack,
    unpack,
)

# Bytes of an array that are sent in one collective.
_AT_ONCE = 32 << 20


def size_of(leaves: Sequence[Encoded]) -> int:
    """Return the bytes of tensors."""
    return sum(array.nbytes for leaf in leaves for array in leaf.arrays)


def chiefs_facts(communicator: Communicator, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the chief's facts, which must be JSON."""
    packed = pack(facts, []) if communicator.rank == 0 else np.zeros(0, np.uint8)
    return unpack(communicator.all_gather(packed)[0])[0]


def chiefs_leaves(communicator: Communicator, leaves: Sequence[Encoded]) -> list[Any]:
    """Return the chief's tensors; dense numbers as arrays.

    Args:
        communicator: The communicator of all workers, which call this together.
        leaves: The chief's tensors; those of other ranks are ignored.
    """
    chiefs = chiefs_facts(communicator, {"leaves": describe(leaves)})["leaves"]
    sent = iter([array for leaf in leaves for array in leaf.arrays])
    chief = communicator.rank == 0

    def receive(name: str, shape: list[int]) -> Any:
        if chief:
            array = np.ascontiguousarray(next(sent))
        else:
            array = np.empty(shape, as_dtype(name))
        octets = array.reshape(-1).view(np.uint8)
        for start in range(0, len(octets), _AT_ONCE):
            part = octets[start : start + _AT_ONCE]
            received = communicator.broadcast([part])[0]
            if not chief:
                part[:] = received
        return array.reshape(shape)

    found = [
        Encoded(kind, tuple(receive(*form) for form in forms), inner)
        for kind, inner, forms in chiefs
    ]
    return [decode(encoded) for encoded in found]
