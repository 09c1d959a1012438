"""Several flat arrays as if they were one, without copying them together."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from kerasdist.collectives.ops import Array

__all__ = ["Parts"]


class Parts:
    """The concatenation of flat arrays of one dtype.

    Args:
        parts: The arrays, in order.
    """

    def __init__(self, parts: Sequence[Array]) -> None:
        self._parts = [part for part in parts if part.size]
        self._starts: list[int] = []
        total = 0
        for part in self._parts:
            self._starts.append(total)
            total += part.size

    def views(self, start: int, stop: int) -> list[Array]:
        """Return views that make up elements `start` to `stop`, without empty ones."""
        if start >= stop:
            return []
        first = bisect.bisect_right(self._starts, start) - 1
        last = bisect.bisect_left(self._starts, stop)
        found = self._parts[first:last]
        # The last one first: it may be the first one too.
        found[-1] = found[-1][: stop - self._starts[last - 1]]
        found[0] = found[0][start - self._starts[first] :]
        return found

    def take(self, start: int, stop: int) -> Array:
        """Return elements `start` to `stop`: a view if they are of one array."""
        views = self.views(start, stop) or [self._parts[0][:0]]
        return views[0] if len(views) == 1 else np.concatenate(views)

    def copy_to(self, out: Array, start: int, stop: int) -> None:
        """Copy elements `start` to `stop`."""
        views = self.views(start, stop)
        if len(views) == 1:
            np.copyto(out, views[0])
        elif views:
            np.concatenate(views, out=out)
