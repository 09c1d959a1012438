"""Several arrays as if they were one."""

from __future__ import annotations

import numpy as np
import pytest

from kerasdist.collectives.fused_buffer import FusedBuffer, aligned


@pytest.mark.parametrize(
    "sizes", [[7], [3, 4], [0, 3, 0, 0, 1, 5, 0], [1] * 9, [0], []]
)
def test_every_range_is_that_of_the_concatenation(sizes):
    whole = np.arange(sum(sizes))
    ends = np.cumsum(sizes)[:-1] if sizes else []
    parts = FusedBuffer(np.split(whole, ends) if sizes else [])
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


@pytest.mark.parametrize("scale", [0, 0.5])
def test_a_scale_leaves_the_last_elements_as_they_are(scale):
    whole = np.arange(1, 8, dtype=np.float32)
    for scaled in range(8):
        parts = FusedBuffer([whole[:3], whole[3:]], scale, scaled)
        expected = [*(whole[:scaled] * scale), *whole[scaled:]]
        for start in range(7):
            for stop in range(start, 8):
                out = np.full(stop - start, -1, np.float32)
                parts.copy_to(out, start, stop)
                assert out.tolist() == expected[start:stop]


@pytest.mark.parametrize("scale", [None, 0, 0.5])
def test_elements_are_combined_as_if_they_had_been_copied_before(scale):
    whole, other = np.arange(1, 8, dtype=np.float32), np.float32(10) ** np.arange(7)
    for scaled in range(8):
        parts = FusedBuffer([whole[:3], whole[3:]], scale, scaled)
        for start in range(8):
            for stop in range(start, 8):
                copied = np.empty(stop - start, np.float32)
                parts.copy_to(copied, start, stop)
                out = np.full(stop - start, -1, np.float32)
                parts.combine_to(out, start, stop, np.subtract, other[start:stop])
                assert out.tolist() == (copied - other[start:stop]).tolist()


def test_a_scale_of_0_takes_nothing_of_what_isnt_a_number():
    parts = FusedBuffer(
        [np.full(3, np.nan, np.float32), np.full(2, np.inf, np.float32)], 0
    )
    out = np.ones(5, np.float32)
    parts.copy_to(out, 0, 5)
    assert out.tolist() == [0] * 5


@pytest.mark.parametrize("dtype", [np.int8, np.float16, np.float64, np.longdouble])
def test_large_arrays_are_aligned(dtype):
    sizes = (1, 5000, 3, 0, 7, 4097, 4096)
    arrays = [np.full(size, i, dtype) for i, size in enumerate(sizes)]
    parts, starts = aligned(arrays)
    whole = np.concatenate(parts)
    for array, start in zip(arrays, starts, strict=True):
        assert whole[start : start + array.size].tolist() == array.tolist()
        if array.nbytes >= 4096:
            assert start * whole.itemsize % 64 == 0
    assert whole.size - sum(array.size for array in arrays) < 3 * 64


def test_small_arrays_lie_side_by_side():
    parts, starts = aligned([np.ones((2, 3)), np.float64(2), np.ones(4)])
    assert starts == [0, 6, 7]
    assert sum(part.size for part in parts) == 11
