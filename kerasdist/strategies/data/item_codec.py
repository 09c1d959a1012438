"""The common form of all items of a PyDataset, and the encoding of an item as bytes.

An item is sent between workers as one buffer:

    int64  index of the item
    int64  sizes of all dimensions of array 0, of array 1, ...
           array 0, array 1, ...: each begins at a multiple of 64 bytes

Structure, dtypes and numbers of dimensions aren't sent: they are those of item 0,
which all workers have compared.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

# Messages for users about data that differ between the workers.

_SEED = (
    "If each worker's data are its own part, give the strategy shard='off'. If all "
    "workers should have the same data, seed what makes them "
    "(`keras.utils.set_random_seed` with the same number on all workers, before the "
    "data are made)"
)
REMEDIES = f"{_SEED}, or give the strategy data='chief': then the chief's are used."
_ELASTIC_REMEDIES = (
    f"{_SEED}. With elastic=True the chief's data can't be used on all workers: "
    "the chief may be lost."
)


def with_remedies(what: str, received: str) -> ValueError:
    """Return an error about data that differ.

    Args:
        what: The fault, without a full stop.
        received: The facts that were found.
    """
    return ValueError(f"{what}. Received: {received}. {REMEDIES}")


def other_forms(name: str, forms: dict[int, str]) -> ValueError:
    """Return the error about data of different structures, by rank."""
    every = "; ".join(f"rank {rank}: {form}" for rank, form in forms.items())
    return with_remedies(f"The workers were given {name} of different forms", every)


def own_parts(name: str, how: str) -> ValueError:
    """Return the error about data that are each worker's own part."""
    return with_remedies(
        f"The workers were given different {name}, which look like each worker's own "
        "part of the data; without shard='off' all workers must be given all data, of "
        "which each takes its rows",
        how,
    )


def strangers(name: str, found: str) -> ValueError:
    """Return the error about data that can't be classified."""
    return with_remedies(
        f"The workers were given different {name}, and it isn't known whether they are "
        "each worker's own part, or should be the same",
        found,
    )


def used(name: str, why: str, cost: str) -> str:
    """Return the line for the user about the use of the chief's data."""
    return (
        f"kerasdist: the chief's {name} are used on all workers ({why}); {cost}. With "
        "the same seed on all workers (keras.utils.set_random_seed) each reads its own."
    )


def in_elastic_job(error: ValueError) -> ValueError:
    """Return an error about data that differ with the remedies of an elastic job."""
    text = str(error)
    if REMEDIES not in text:
        return error
    return type(error)(text.replace(REMEDIES, _ELASTIC_REMEDIES))


Array = npt.NDArray[Any]
_ALIGNMENT = 64


class ItemCodec:
    """The form of an item.

    Args:
        item: A nest of arrays and None.

    Attributes:
        text: The form as text; equal for equal forms, in every process.
        exchangeable: Whether such items can be sent: all leaves are arrays of
            numbers with at least one dimension, and there is one.
    """

    def __init__(self, item: Any) -> None:
        leaves = tf.nest.flatten(item)
        self._structure = tf.nest.map_structure(_kind, item)
        self._given = [leaf is not None for leaf in leaves]
        self.text = str(self._structure)
        arrays = [leaf for leaf in leaves if leaf is not None]
        self.exchangeable = bool(arrays) and all(map(_is_exchangeable, arrays))
        if self.exchangeable:
            self._dtypes = [array.dtype for array in arrays]
            self._dimensions = [array.ndim for array in arrays]
            self._head = 8 * (1 + sum(self._dimensions))

    def pack(self, index: int, item: Any) -> Array:
        """Encode an item as bytes.

        Raises:
            ValueError: The item has another form. Dtypes may differ: arrays are
                converted, as TensorFlow converts a generator's values.
        """
        other = ItemCodec(item)
        if not other.exchangeable or (
            (other._given, other._dimensions) != (self._given, self._dimensions)
        ):
            raise ValueError(
                "All items of a PyDataset must have the same structure and numbers of "
                f"dimensions. Received: item {index} with {other.text}; item 0 has "
                f"{self.text}."
            )
        arrays = [
            np.ascontiguousarray(leaf, dtype)
            for leaf, dtype in zip(_arrays(item), self._dtypes, strict=True)
        ]
        starts, total = self._places([array.nbytes for array in arrays])
        packed = np.zeros(total, np.uint8)
        head = [index, *(size for array in arrays for size in array.shape)]
        packed[: self._head] = np.array(head, np.int64).view(np.uint8)
        for start, array in zip(starts, arrays, strict=True):
            flat = array.reshape(-1).view(np.uint8)
            packed[start : start + array.nbytes] = flat
        return packed

    def unpack(self, packed: Array) -> tuple[int, list[Array]]:
        """Decode an item's index and its arrays, which share the buffer's memory."""
        index, *sizes = (int(n) for n in packed[: self._head].view(np.int64))
        shapes = []
        for dimensions in self._dimensions:
            shapes.append(sizes[:dimensions])
            del sizes[:dimensions]
        bytes_of = [
            int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            for shape, dtype in zip(shapes, self._dtypes, strict=True)
        ]
        starts, _ = self._places(bytes_of)
        return index, [
            packed[start : start + length].view(dtype).reshape(shape)
            for start, length, dtype, shape in zip(
                starts, bytes_of, self._dtypes, shapes, strict=True
            )
        ]

    def item(self, leaves: list[Any]) -> Any:
        """Return a nest of this structure, with `leaves` in place of its arrays."""
        following = iter(leaves)
        flat = [next(following) if given else None for given in self._given]
        return tf.nest.pack_sequence_as(self._structure, flat)

    def example(self, item: Any) -> Any:
        """Return an item of zeros with an item's shapes, which takes no memory."""
        return self.item(
            [
                np.broadcast_to(np.zeros((), dtype), array.shape)
                for array, dtype in zip(_arrays(item), self._dtypes, strict=True)
            ]
        )

    def rows(self, item: Any) -> int:
        """Return the number of rows of an item."""
        return int(_arrays(item)[0].shape[0])

    def checksums(self, item: Any) -> list[int]:
        """Return one number for each array, from its shape and contents."""
        return [
            zlib.crc32(
                np.ascontiguousarray(a).tobytes(), zlib.crc32(str(a.shape).encode())
            )
            for a in _arrays(item)
        ]

    def _places(self, lengths: list[int]) -> tuple[list[int], int]:
        """Return where arrays of these lengths begin, and where the last one ends."""
        starts, end = [], self._head
        for length in lengths:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            starts.append(start)
            end = start + length
        return starts, end


def _arrays(item: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(item) if leaf is not None]


def _kind(leaf: Any) -> str | None:
    if leaf is None:
        return None
    if not isinstance(leaf, np.ndarray):
        return type(leaf).__name__
    return f"{leaf.dtype.name}[{leaf.ndim}]"


def _is_exchangeable(leaf: Any) -> bool:
    if not isinstance(leaf, np.ndarray) or leaf.ndim == 0:
        return False
    try:
        dtype = tf.as_dtype(leaf.dtype)
    except TypeError:
        return False
    return bool(
        dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex
    )
