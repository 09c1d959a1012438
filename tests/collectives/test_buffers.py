"""Several arrays as if they were one; memory is used again when nobody has it."""

import weakref

import numpy as np
import pytest

from kerasdist.collectives.checked import MOST_SIGNATURES, Signatures
from kerasdist.collectives.fused_buffer import BufferPool, aligned


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


FLOAT = np.dtype("float32")
LARGE = 1 << 18  # elements of 1 MB


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize(
    "hold",
    [
        lambda a: a,
        lambda a: a[5:9],
        lambda a: a.reshape(2, -1)[1:, ::3].T,
        lambda a: a.view(np.uint8)[7:8],
        lambda a: a[10:20].data,
        lambda a: memoryview(a[3:])[1:],
    ],
    ids=["itself", "slice", "view of view", "other dtype", "memory", "its slice"],
)
def test_memory_that_anything_refers_to_is_not_used_again(hold):
    buffers = BufferPool()
    array = buffers.empty(LARGE, FLOAT)
    where = address(array)
    held = hold(array)
    del array
    assert address(buffers.empty(LARGE, FLOAT)) != where
    del held
    assert where in {address(a) for a in [buffers.empty(LARGE, FLOAT) for _ in "ab"]}


def test_what_nobody_asks_for_is_given_back():
    buffers = BufferPool()
    # Of each array: the memory that the pool keeps of it.
    small = weakref.ref(buffers.empty(LARGE, FLOAT).base)
    for _ in range(100):
        large = weakref.ref(buffers.empty(LARGE * 2, FLOAT).base)
    assert (small() is None, large() is None) == (True, False)
    buffers.clear()
    assert large() is None


def test_many_different_calls_need_little_memory():
    known = Signatures()

    def signature(length):
        return known.of([np.ones(length)], "sum", None, 0, False)

    kept = signature(1)
    assert signature(1) is kept
    for length in range(2, MOST_SIGNATURES + 3):
        signature(length)
    assert signature(1) is not kept
