"""Several arrays as if they were one."""

from __future__ import annotations

import numpy as np
import pytest

from kerasdist.collectives.parts import Parts


@pytest.mark.parametrize(
    "sizes", [[7], [3, 4], [0, 3, 0, 0, 1, 5, 0], [1] * 9, [0], []]
)
def test_every_range_is_that_of_the_concatenation(sizes):
    whole = np.arange(sum(sizes))
    ends = np.cumsum(sizes)[:-1] if sizes else []
    parts = Parts(np.split(whole, ends) if sizes else [])
    for start in range(len(whole) + 1):
        for stop in range(start, len(whole) + 1):
            views = parts.views(start, stop)
            assert all(view.size for view in views)
            assert all(np.shares_memory(view, whole) for view in views)
            joined = [number for view in views for number in view.tolist()]
            assert joined == whole[start:stop].tolist()
            out = np.full(stop - start, -1)
            parts.copy_to(out, start, stop)
            assert out.tolist() == joined
            if len(whole):
                assert parts.take(start, stop).tolist() == joined


def test_what_is_of_one_array_is_taken_without_copying():
    first, second = np.arange(5), np.arange(5, 9)
    parts = Parts([first, second])
    assert np.shares_memory(parts.take(1, 5), first)
    assert np.shares_memory(parts.take(5, 9), second)
    assert not np.shares_memory(parts.take(4, 6), first)
