"""Buckets of arrays that are sent at once, and buffers that aren't copied together."""

from __future__ import annotations

import bisect
import mmap
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kerasdist.collectives.row_exchange import Array


def in_buckets(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Divide gradients into buckets, from the last one to the first.

    The result depends only on numbers that are the same on all workers, and so do the
    buckets' contents and order.

    Args:
        sizes: Bytes of each gradient.
        limit: Maximum bytes of a bucket; a larger gradient has a bucket of its own.

    Returns:
        Indices of gradients, by bucket, in the order in which buckets are sent.
    """
    result: list[list[int]] = []
    room = 0
    for index in reversed(range(len(sizes))):
        if not result or sizes[index] > room:
            result.append([])
            room = limit
        result[-1].append(index)
        room -= sizes[index]
    return result


# Buffers of results, whose memory is reused when it isn't referred to any more.
#
# The kernel supplies the memory of a large new array page by page, filled with zeros,
# at the first access: that costs as much as an all-reduce inside a host. A training
# loop drops the results of a step before the next one needs the same sizes.

# Smaller arrays are made of memory that the process already has.
_SMALLEST_BYTES = 64 << 10
# Memory that isn't used for this many requests is freed.
_MOST_REQUESTS = 64
_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)


class Memory:
    """Memory of results, and whether one of them is still in use.

    An array is in use while it, or any view of it, is referred to: numpy lets every
    view hold the array that owns the memory, whose references are counted.

    Args:
        buffer: The array that owns the memory; nothing else may refer to it.
        used: Number of the request that it was used for last.
    """

    def __init__(self, buffer: npt.NDArray[np.uint8], used: int) -> None:
        self.buffer = buffer
        self.used = used

    @property
    def in_use(self) -> bool:
        """Whether anything refers to the buffer or a view of it."""
        return self._references() > _UNUSED

    def _references(self) -> int:
        return sys.getrefcount(self.buffer)


# The references to a buffer that isn't in use.
_UNUSED = Memory(np.empty(0, np.uint8), 0)._references()


class MemoryPool:
    """Keeps the memory of arrays that were dropped.

    Attributes:
        memories: Those that it has, in use or not.
    """

    def __init__(self) -> None:
        self.memories: list[Memory] = []
        self._requests = 0

    def _free(self) -> None:
        """Drop what wasn't used lately; an array in use keeps its memory alive."""
        oldest = self._requests - _MOST_REQUESTS
        self.memories = [m for m in self.memories if m.used > oldest]

    def clear(self) -> None:
        """Drop all memories; arrays in use stay valid."""
        self.memories = []


class BufferPool(MemoryPool):
    """Makes arrays; keeps the memory of those that were dropped."""

    def empty(self, elements: int, dtype: np.dtype[Any]) -> Array:
        """Return a flat, uninitialized array that nothing else refers to."""
        size = elements * dtype.itemsize
        if size < _SMALLEST_BYTES:
            return np.empty(elements, dtype)
        self._requests += 1
        for memory in self.memories:
            if memory.buffer.size == size and not memory.in_use:
                break
        else:
            memory = Memory(_allocate(size), 0)
            self.memories.append(memory)
        memory.used = self._requests
        self._free()
        return memory.buffer.view(dtype)


def _allocate(size: int) -> npt.NDArray[np.uint8]:
    # Begins at a page: TensorFlow takes over aligned memory without copying.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _HUGE is not None:
        try:
            memory.madvise(_HUGE)
        except OSError:  # a kernel without huge pages
            pass
    return np.frombuffer(memory, np.uint8)


# TensorFlow takes over memory that begins at a multiple of this without copying.
_ALIGNMENT = 64
# Smaller arrays are copied as fast as they are taken over.
_LEAST_ALIGNED = 4096


class FusedBuffer:
    """The concatenation of flat arrays of one dtype, each element times a number.

    Args:
        parts: The arrays, in order.
        scale: The number, for arrays of floats; None: the elements as they are. With
            0 all are 0, whatever the arrays hold (0 x NaN isn't).
        scaled: How many elements, the first ones, are multiplied; None: all.

    Attributes:
        elements: Number of elements, over all arrays.
        dtype: Their dtype; uint8 if there's no array.
    """

    def __init__(
        self,
        parts: Sequence[Array],
        scale: float | None = None,
        scaled: int | None = None,
    ) -> None:
        self.dtype = parts[0].dtype if parts else np.dtype("uint8")
        self._parts = [part for part in parts if part.size]
        # What is multiplied by 1 is read once. No float64 of numpy's, with which numpy
        # multiplies float32 in 64 bits.
        self._scale = None if scale is None or scale == 1 else float(scale)
        self._starts: list[int] = []
        total = 0
        for part in self._parts:
            self._starts.append(total)
            total += part.size
        self.elements = total
        self._scaled = total if scaled is None else scaled

    def views(self, start: int, stop: int) -> list[Array]:
        """Return views of elements `start` to `stop`, unscaled, without empty ones."""
        if start >= stop:
            return []
        first = bisect.bisect_right(self._starts, start) - 1
        last = bisect.bisect_left(self._starts, stop)
        found = self._parts[first:last]
        # The last one is cut before the first: it may be the same one.
        found[-1] = found[-1][: stop - self._starts[last - 1]]
        found[0] = found[0][start - self._starts[first] :]
        return found

    def copy_to(
        self, out: Array, start: int, stop: int, *, stream: bool = False
    ) -> None:
        """Copy elements `start` to `stop`; `stream`: see `combine_arrays`."""
        self.combine_to(out, start, stop, None, out, stream=stream)

    def combine_to(
        self,
        out: Array,
        start: int,
        stop: int,
        operation: np.ufunc | None,
        other: Array,
        *,
        copy: Array | None = None,
        stream: bool = False,
    ) -> None:
        """Combine elements `start` to `stop` with as many others.

        Args:
            out: The results.
            start: Of the elements.
            stop: Of the elements.
            operation: Its first argument are this buffer's elements; None: they are
                copied.
            other: The second argument.
            copy: Gets the results, too.
            stream: See `combine_arrays`.
        """
        middle = min(max(start, self._scaled), stop)
        begin = 0
        for first, last, scale in ((start, middle, self._scale), (middle, stop, None)):
            for view in self.views(first, last):
                part = slice(begin, begin + view.size)
                combine_arrays(
                    *(out[part], view, scale, operation),
                    None if operation is None else other[part],
                    copy=None if copy is None else copy[part],
                    stream=stream,
                )
                begin = part.stop


def aligned(arrays: Sequence[Array]) -> tuple[list[Array], list[int]]:
    """Lay arrays of one dtype out so that in an aligned result large ones are aligned.

    Args:
        arrays: Of any shape.

    Returns:
        Flat arrays, with zeros between them where needed, and the offset of each of
        the given ones, in elements.
    """
    parts: list[Array] = []
    starts = []
    total = 0
    for array in arrays:
        flat = np.ascontiguousarray(array).reshape(-1)
        beyond = total * flat.itemsize % _ALIGNMENT
        # 4 long doubles are 64 bytes; so is a power of two of any other dtype.
        if beyond and flat.nbytes >= _LEAST_ALIGNED:
            zeros = np.zeros((_ALIGNMENT - beyond) // flat.itemsize, flat.dtype)
            parts.append(zeros)
            total += zeros.size
        starts.append(total)
        parts.append(flat)
        total += flat.size
    return parts, starts


# Passes over large arrays: multiplied, added and stored at once.
#
# Where `setup.py` has found a compiler they are compiled (`_kernels.c`). Else numpy
# gives the same bits in up to three passes.


try:
    from kerasdist.collectives._kernels import combine as _combine
except ImportError:  # a pure wheel
    compiled_combine = None
else:
    compiled_combine = _combine

# Smaller arrays are as fast in numpy, whose calls cost less.
_LEAST_BYTES = 64 << 10


def combine_arrays(
    out: Array,
    values: Array,
    scale: float | None = None,
    operation: np.ufunc | None = None,
    other: Array | None = None,
    *,
    copy: Array | None = None,
    stream: bool = False,
) -> None:
    """Write `operation(values * scale, other)`.

    Args:
        out: The results; none of the other arrays, or exactly one of them.
        values: As many of the same dtype, each flat and contiguous like `out`.
        scale: A number, for arrays of floats; None: elements as they are. With 0 all
            products are 0, whatever the array holds (0 x NaN isn't).
        operation: For instance `numpy.add`; None if nothing is added.
        other: Its second argument.
        copy: Gets the results, too.
        stream: Whether results may be stored past the caches, because this core doesn't
            read them soon.
    """
    if (
        compiled_combine is not None
        and out.nbytes >= _LEAST_BYTES
        and (operation is None or operation is np.add)
        and scale != 0
        # Usual floats, as a compiler understands them.
        and out.dtype.char in "fd"
        and out.dtype.isnative
        and out.flags.aligned
        and values.flags.aligned
    ):
        compiled_combine(out, values, scale, other, copy, stream)
        return
    if scale == 0:
        out.fill(0)
    elif scale is not None:
        np.multiply(values, scale, out=out)
    elif operation is None:
        np.copyto(out, values)
    if operation is not None:
        operation(values if scale is None else out, other, out=out)
    if copy is not None:
        np.copyto(copy, out)
