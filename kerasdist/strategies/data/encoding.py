"""Tensors of any kind encoded as arrays of numbers, and batches of them as bytes.

| kind | arrays |
| --- | --- |
| dense | the array |
| text | the length of each string, in the shape of the tensor; all bytes |
| ragged | the row splits, outermost first; then those of the flat values |
| sparse | indices, dense shape; then those of the values |
| none | none |

A packed batch is an int64, the size of a JSON header; the header; and the arrays. Each
begins at a multiple of 64 bytes. Nothing is pickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from kerasdist.collectives import Communicator, gather_json

# The chief's arrays on all workers.

# Bytes of an array that are sent in one collective.
_AT_ONCE = 32 << 20


def size_of(leaves: Sequence[Encoded]) -> int:
    """Return the bytes of tensors."""
    return sum(array.nbytes for leaf in leaves for array in leaf.arrays)


def chiefs_facts(communicator: Communicator, facts: dict[str, Any]) -> Any:
    """Return the chief's facts, which must be JSON."""
    mine = facts if communicator.rank == 0 else None
    return gather_json(communicator, mine)[0]


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
            array = np.empty(shape, name)
        octets = array.reshape(-1).view(np.uint8)
        for start in range(0, len(octets), _AT_ONCE):
            part = octets[start : start + _AT_ONCE]
            received = communicator.broadcast([part])[0]
            if not chief:
                part[:] = received
        return array.reshape(shape)

    return [
        decode(Encoded(kind, tuple(receive(*form) for form in forms), inner))
        for kind, inner, forms in chiefs
    ]


Array = npt.NDArray[Any]
_ALIGNMENT = 64


@dataclass(frozen=True)
class Encoded:
    """A tensor as arrays of numbers.

    Attributes:
        kind: "dense", "text", "ragged", "sparse" or "none".
        arrays: The arrays, see above.
        inner: Kind of the values of a ragged or sparse tensor; else empty.
    """

    kind: str
    arrays: tuple[Array, ...] = ()
    inner: str = ""

    @property
    def form(self) -> str:
        """Return kind, dtype and number of dimensions, as text."""
        if self.kind == "none":
            return "none"
        if self.kind == "dense":
            return f"{self.arrays[0].dtype.name}[{self.arrays[0].ndim}]"
        if self.kind == "text":
            return f"string[{self.arrays[0].ndim}]"
        return f"{self.kind} {self.values.form}"

    @property
    def values(self) -> Encoded:
        """Return the values of a ragged or sparse tensor."""
        last = 1 if self.inner == "dense" else 2
        return Encoded(self.inner, self.arrays[-last:])

    @property
    def rest(self) -> tuple[Array, ...]:
        """Return the arrays of a ragged or sparse tensor except its values."""
        return self.arrays[: -1 if self.inner == "dense" else -2]

    @property
    def words(self) -> list[bytes]:
        """Return the strings of text."""
        lengths, joined = self.arrays[0].reshape(-1), self.arrays[1].tobytes()
        named = zip(np.cumsum(lengths), lengths, strict=True)
        return [joined[end - length : end] for end, length in named]

    @property
    def rows(self) -> int | None:
        """Return the size of the first dimension; None if there is none."""
        if self.kind == "none":
            return None
        if self.kind == "ragged":
            return len(self.arrays[0]) - 1
        if self.kind == "sparse":
            return int(self.arrays[1][0])
        return self.arrays[0].shape[0] if self.arrays[0].ndim else None


def encode(leaf: Any) -> Encoded:
    """Encode a tensor, or anything that NumPy converts to an array, as arrays.

    Dense numbers aren't copied.

    Raises:
        TypeError: The tensor contains resources or variants.
    """
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return Encoded("none")
    if isinstance(leaf, tf.RaggedTensor):
        flat = encode(leaf.flat_values)
        splits = [np.asarray(part) for part in leaf.nested_row_splits]
        return Encoded("ragged", (*splits, *flat.arrays), flat.kind)
    if isinstance(leaf, tf.SparseTensor):
        values = encode(leaf.values)
        where = np.asarray(leaf.indices), np.asarray(leaf.dense_shape)
        return Encoded("sparse", (*where, *values.arrays), values.kind)
    if tf.is_tensor(leaf) and leaf.dtype in (tf.resource, tf.variant):
        raise TypeError(f"A tensor of dtype {leaf.dtype.name} can't be sent.")
    array = np.asarray(leaf)
    if array.dtype.kind not in "OSU":
        return Encoded("dense", (array,))
    words = [_as_bytes(word) for word in array.reshape(-1)]
    lengths = np.array([len(word) for word in words], np.int64).reshape(array.shape)
    return Encoded("text", (lengths, np.frombuffer(b"".join(words), np.uint8)))


def decode(encoded: Encoded) -> Any:
    """Decode what `encode` returned: an array for dense numbers, else a tensor."""
    if encoded.kind == "none":
        return None
    if encoded.kind == "dense":
        return encoded.arrays[0]
    if encoded.kind == "text":
        texts = tf.constant(encoded.words, tf.string)
        return tf.reshape(texts, encoded.arrays[0].shape)
    values = tf.convert_to_tensor(decode(encoded.values))
    if encoded.kind == "ragged":
        splits = [tf.convert_to_tensor(part) for part in encoded.rest]
        return tf.RaggedTensor.from_nested_row_splits(values, splits, validate=False)
    indices, shape = encoded.rest
    return tf.SparseTensor(indices, values, shape)


def pack(facts: dict[str, Any], leaves: Sequence[Encoded]) -> Array:
    """Pack facts, which must be JSON, and tensors as bytes."""
    arrays = [np.ascontiguousarray(array) for leaf in leaves for array in leaf.arrays]
    header = json.dumps({"facts": facts, "leaves": describe(leaves)}).encode()
    parts = [np.array([len(header)]), np.frombuffer(header, np.uint8), *arrays]
    padded = []
    for part in parts:
        octets = part.reshape(-1).view(np.uint8)
        padded += [octets, np.zeros(-octets.size % _ALIGNMENT, np.uint8)]
    return np.concatenate(padded)


def unpack(packed: Array) -> tuple[dict[str, Any], list[Encoded]]:
    """Unpack what `pack` returned. Arrays share the memory of `packed`."""
    end = _ALIGNMENT + int(packed[:8].view(np.int64)[0])
    header = json.loads(packed[_ALIGNMENT:end].tobytes())
    leaves = []
    for kind, inner, forms in header["leaves"]:
        arrays = []
        for name, shape in forms:
            dtype, start = np.dtype(name), -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + math.prod(shape) * dtype.itemsize
            arrays.append(packed[start:end].view(dtype).reshape(shape))
        leaves.append(Encoded(kind, tuple(arrays), inner))
    return header["facts"], leaves


def describe(leaves: Sequence[Encoded]) -> list[Any]:
    """Return kinds, dtypes and shapes of tensors, as JSON."""
    return [
        [leaf.kind, leaf.inner, [[a.dtype.name, list(a.shape)] for a in leaf.arrays]]
        for leaf in leaves
    ]


def _as_bytes(word: Any) -> bytes:
    if isinstance(word, bytes):
        return word
    return word.encode() if isinstance(word, str) else repr(word).encode()
