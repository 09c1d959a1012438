"""Several arrays as if they were one; memory is used again when nobody has it."""

import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerasdist.collectives import fused_buffer as fused
from kerasdist.collectives.checked import MOST_SIGNATURES, signature_of
from kerasdist.collectives.fused_buffer import BufferPool, FusedBuffer, aligned


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
    def signature(length):
        return signature_of(((np.dtype(float), (length,)),), "sum", 0, False)

    kept = signature(1)
    assert signature(1) is kept
    for length in range(2, MOST_SIGNATURES + 3):
        signature(length)
    assert signature(1) is not kept


# Of the pieces of a pass, below and above the size from which they are compiled.
SIZES = st.lists(st.sampled_from([0, 1, 5, 70_001]), min_size=1, max_size=4)
ODD = [0.0, -0.0, 1e-42, np.inf, -np.inf, np.nan, 3e38]
PASSES = pytest.mark.parametrize("passes", ["compiled", "numpy"])


def passes_of(monkeypatch, passes):
    if passes == "numpy":
        monkeypatch.setattr(fused, "compiled_combine", None)
    elif fused.compiled_combine is None:
        pytest.skip("there was no compiler when kerasdist was installed")


@PASSES
def test_a_pass_gives_the_bits_of_numpy(passes):
    @given(
        SIZES,
        st.sampled_from(["f4", "f8", "f2", "i4"]),
        st.sampled_from([None, 0, 1 / 3, 1e-45]),
        st.sampled_from([None, np.add, np.maximum]),
        st.booleans(),
        st.booleans(),
        st.integers(0, 3),
    )
    def check(sizes, dtype, scale, operation, twice, stream, beyond):
        rng = np.random.default_rng(sum(sizes))
        scale = None if dtype == "i4" else scale
        parts = [(100 * rng.normal(size=n)).astype(dtype) for n in sizes]
        whole = np.concatenate(parts)
        if dtype != "i4":
            with np.errstate(over="ignore"):
                whole[: len(ODD)] = ODD[: whole.size]
        parts = np.split(whole, np.cumsum(sizes)[:-1])
        scaled, start = whole.size // 2, min(beyond, whole.size)
        expected = whole.copy()
        with np.errstate(all="ignore"):
            if scale is not None:
                expected[:scaled] *= scale
            if scale == 0:
                expected[:scaled] = 0
            other = np.roll(whole, 1)
            if operation is not None:
                expected = operation(expected, other)
            out, copy = np.empty((2, whole.size + beyond), dtype)[:, beyond:]
            FusedBuffer(parts, scale, scaled).combine_to(
                *(out[start:], start, whole.size),
                *(operation, other[start:]),
                copy=copy[start:] if twice else None,
                stream=stream,
            )
        for some in (out, copy) if twice else (out,):
            assert some[start:].tobytes() == expected[start:].tobytes()

    with pytest.MonkeyPatch.context() as patch:
        passes_of(patch, passes)
        check()


@PASSES
def test_unusual_floats_are_left_to_numpy(monkeypatch, passes):
    passes_of(monkeypatch, passes)
    octets = bytearray(b"?" + np.arange(70_001, dtype="f4").tobytes())
    unaligned = np.frombuffer(octets, "f4", offset=1)
    for values in (unaligned, unaligned.astype(">f4")):
        out = np.empty_like(values)
        fused.combine_arrays(out, values, 0.5, np.add, np.ones_like(out), stream=True)
        np.testing.assert_array_equal(out, np.arange(70_001) / 2 + 1)


def test_wrong_arrays_are_not_written():
    if fused.compiled_combine is None:
        pytest.skip("there was no compiler when kerasdist was installed")
    four, fixed = np.zeros(4), np.zeros(4)
    fixed.flags.writeable = False
    for out, values, other in (
        (four, np.ones(3), None),
        (four, np.ones(4, "f4"), None),
        (four, np.ones(4), np.ones(5)),
        (four.view("i8"), np.ones(4, "i8"), None),
        (four[::2], np.ones(2), None),
        (fixed, np.ones(4), None),
    ):
        with pytest.raises((ValueError, BufferError)):
            fused.compiled_combine(out, values, None, other, None, False)
    assert not four.any() | fixed.any()
