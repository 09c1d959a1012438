"""Buffers of results, whose memory is reused when it isn't referred to any more.

The kernel supplies the memory of a large new array page by page, filled with zeros,
at the first access: that costs as much as an all-reduce inside a host. A training
loop drops the results of a step before the next one needs the same sizes.
"""

from __future__ import annotations

import mmap
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from kerasdist.collectives.ops import Array

# Smaller arrays are made of memory that the process already has.
_SMALLEST_BYTES = 64 << 10
# Memory that isn't used for this many requests is freed.
MOST_REQUESTS = 64
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


class BufferPool:
    """Makes arrays; keeps the memory of those that were dropped."""

    def __init__(self) -> None:
        self._entries: list[Memory] = []
        self._requests = 0

    def empty(self, elements: int, dtype: np.dtype[Any]) -> Array:
        """Return a flat, uninitialized array that nothing else refers to."""
        size = elements * dtype.itemsize
        if size < _SMALLEST_BYTES:
            return np.empty(elements, dtype)
        self._requests += 1
        oldest = self._requests - MOST_REQUESTS
        found = None
        kept = []
        for entry in self._entries:
            fits = entry.buffer.size == size
            if found is None and fits and not entry.in_use:
                found = entry
                entry.used = self._requests
            if entry.used > oldest:
                kept.append(entry)
        self._entries = kept
        if found is None:
            found = Memory(_allocate(size), self._requests)
            self._entries.append(found)
        return found.buffer.view(dtype)

    def clear(self) -> None:
        """Drop all memory; arrays in use stay valid."""
        self._entries = []


def _allocate(size: int) -> npt.NDArray[np.uint8]:
    # Begins at a page: TensorFlow takes over aligned memory without copying.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _HUGE is not None:
        try:
            memory.madvise(_HUGE)
        except OSError:  # a kernel without huge pages
            pass
    return np.frombuffer(memory, np.uint8)
