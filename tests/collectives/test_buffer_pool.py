"""Memory of results is used again, but never while somebody still has it."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from kerasdist.collectives.fused_buffer import BufferPool

FLOAT = np.dtype("float32")
LARGE = 1 << 18  # elements of 1 MB


def address(array):
    return array.__array_interface__["data"][0]


def test_dropped_memory_is_used_again_for_the_same_size():
    buffers = BufferPool()
    first = buffers.empty(LARGE, FLOAT)
    assert (first.shape, first.dtype) == ((LARGE,), FLOAT)
    where = address(first)
    del first
    assert address(buffers.empty(LARGE * 2, FLOAT)) != where
    assert address(buffers.empty(LARGE // 2, np.dtype("float64"))) == where


def test_large_arrays_begin_where_tensorflow_takes_them_without_copying():
    assert address(BufferPool().empty(LARGE, FLOAT)) % 4096 == 0


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


def test_small_arrays_are_not_kept():
    assert BufferPool().empty(10, FLOAT).base is None
