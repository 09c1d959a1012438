import ml_dtypes
import numpy as np

INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
COMBINE = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
SHAPES = [(), (1,), (0,), (3, 0, 2), (2, 3), (7,), (4, 1, 5), (1000,), (33, 129)]


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def values(generator, shape, name, rank):
    """Small whole numbers: every order of summation gives the same result."""
    dtype = dtype_of(name)
    low = 0 if dtype.kind in "bu" else -3
    numbers = generator.integers(low, 4, size=shape) + (
        rank if dtype.kind == "i" else 0
    )
    if dtype.kind == "c":
        numbers = numbers + 1j * generator.integers(-3, 4, size=shape)
    return np.asarray(numbers).astype(dtype)


def reference(arrays, op):
    total = arrays[0].copy()
    for array in arrays[1:]:
        total = np.asarray(COMBINE[op](total, array), dtype=total.dtype)
    return total


def same_bytes(results):
    first = [(a.dtype, a.shape, a.tobytes()) for a in results[0]]
    return all([(a.dtype, a.shape, a.tobytes()) for a in r] == first for r in results)


def generators(group, seed):
    return [np.random.default_rng([seed, rank]) for rank in range(group.size)]


def test_all_reduce_equals_numpy_for_every_dtype_and_shape(group):
    for op in COMBINE:
        names = [*INTS, *FLOATS]
        names += ["bool"] if op in ("min", "max") else COMPLEX
        inputs = [
            [values(g, shape, name, rank) for name in names for shape in SHAPES]
            for rank, g in enumerate(generators(group, 1))
        ]

        results = group.run(lambda c, op=op, a=inputs: c.all_reduce(a[c.rank], op))

        assert same_bytes(results)
        for index, result in enumerate(results[0]):
            expected = reference([rank[index] for rank in inputs], op)
            assert result.dtype == expected.dtype
            assert result.shape == expected.shape
            np.testing.assert_array_equal(result, expected)


def test_results_are_new_writable_arrays_and_inputs_are_not_changed(group):
    shapes = [(), (5,), (0,), (300, 100)]
    inputs = [[np.full(s, r, np.float32) for s in shapes] for r in range(group.size)]
    copies = [[array.copy() for array in arrays] for arrays in inputs]

    def work(communicator):
        mine = inputs[communicator.rank]
        for array in mine:
            array.flags.writeable = False
        first = communicator.all_reduce(mine)
        kept = [array.copy() for array in first]
        second = communicator.all_reduce(mine)
        second += communicator.broadcast(mine)
        second += communicator.all_gather(mine[1])
        for array in second:
            array[...] = 7  # writable, and nobody else's memory
        communicator.barrier()
        return first, kept, second

    for rank, (first, kept, second) in enumerate(group.run(work)):
        for a, b in zip(inputs[rank], copies[rank], strict=True):
            np.testing.assert_array_equal(a, b)
        for a, b in zip(first, kept, strict=True):
            np.testing.assert_array_equal(a, b)
        everything = [*first, *second, *inputs[rank]]
        for i, a in enumerate(everything):
            assert not any(np.shares_memory(a, b) for b in everything[:i])


def test_sums_that_depend_on_the_order_have_the_same_bits_on_all_ranks(group):
    def inputs(rank):
        g = np.random.default_rng([2, rank])
        return [
            (g.standard_normal(10_007) * 10.0 ** g.integers(-4, 5)).astype(dtype_of(n))
            for n in FLOATS
        ]

    results = group.run(lambda c: c.all_reduce(inputs(c.rank)))

    assert same_bytes(results)
    everyone = [inputs(rank) for rank in range(group.size)]
    for index, result in enumerate(results[0]):
        exact = np.sum([rank[index].astype(np.float64) for rank in everyone], axis=0)
        size = np.sum([abs(r[index].astype(np.float64)) for r in everyone], axis=0)
        epsilon = float(ml_dtypes.finfo(result.dtype).eps)
        error = abs(result.astype(np.float64) - exact)
        assert (error <= group.size * epsilon * size).all()


def test_integers_wrap_and_floats_overflow_to_infinity_without_a_warning(group):
    big = np.array([60000.0], np.float16)
    inputs = [np.array([200], np.uint8), big, np.array([np.inf]), np.array([np.nan])]

    def work(communicator):
        # An error would stop one rank alone, and leave the others waiting.
        with np.errstate(all="raise"):
            return communicator.all_reduce(inputs)

    results = group.run(work)

    assert same_bytes(results)
    wrapped, overflown, infinite, missing = results[0]
    assert wrapped == 200 * group.size % 256
    assert overflown == (big if group.size == 1 else np.inf)
    assert infinite == np.inf
    assert np.isnan(missing)


def test_all_reduce_of_views_that_are_not_contiguous(group):
    base = np.arange(240).reshape(4, 6, 10)
    views = [
        base[::2, 1::3],
        base.T,
        base[:, :, ::-1],
        np.broadcast_to(base[0], (3, 6, 10)),
    ]

    results = group.run(lambda c: c.all_reduce(views))

    assert same_bytes(results)
    for view, result in zip(views, results[0], strict=True):
        np.testing.assert_array_equal(result, view * group.size)


def test_python_numbers_lists_and_nothing(group):
    root = np.int64(group.size - 1)

    def work(communicator):
        assert communicator.all_reduce([]) == communicator.broadcast([]) == []
        assert communicator.all_reduce((), "min") == []
        (given,) = communicator.broadcast([communicator.rank], root)
        numbers = communicator.all_reduce([1.5, 2, [1, 2], True], "max")
        return [given, *numbers]

    for results in group.run(work):
        assert [r.tolist() for r in results] == [root, 1.5, 2, [1, 2], True]
        assert [r.shape for r in results] == [(), (), (), (2,), ()]


def test_large_buffers(group):
    elements = (1 << 20) - 3  # of 4 bytes: see `group`

    def work(communicator):
        array = np.arange(elements, dtype=np.float32) % 1000 + communicator.rank
        (total,) = communicator.all_reduce([array])
        (given,) = communicator.broadcast([array], root=communicator.size - 1)
        gathered = communicator.all_gather(array[: 200_000 + communicator.rank])
        return total, given, gathered

    base = np.arange(elements, dtype=np.float32) % 1000
    for total, given, gathered in group.run(work):
        np.testing.assert_array_equal(total, base * group.size + sum(range(group.size)))
        np.testing.assert_array_equal(given, base + group.size - 1)
        for rank, part in enumerate(gathered):
            np.testing.assert_array_equal(part, base[: 200_000 + rank] + rank)


def test_a_scale_multiplies_each_ranks_own(group):
    """But the last ones; and with 0 a rank adds nothing, whatever it holds."""

    def work(communicator):
        rank = communicator.rank
        share = 0.0 if rank == 0 else rank / 8
        results = []
        for name in ("float16", "float32", "float64"):
            whole = np.arange(100_003) % 16
            parts = [(whole[a:b]).astype(name) for a, b in ((0, 3), (3, 100_003))]
            if rank == 0:
                parts[1][5] = np.nan
            beside = [np.arange(5, dtype=name), np.arange(3)]
            totals = communicator.all_reduce([*parts, *beside], scale=share, unscaled=2)
            for total, each in zip(totals[2:], beside, strict=True):
                assert total.tolist() == (each * communicator.size).tolist()
            del totals[2:]
            results.append([total.dtype == name for total in totals])
            results.append(np.concatenate(totals).astype("float64"))
        return results

    total = sum(range(group.size)) / 8
    expected = (np.arange(100_003) % 16) * total
    for results in group.run(work):
        for dtypes, numbers in zip(results[::2], results[1::2], strict=True):
            assert all(dtypes)
            np.testing.assert_array_equal(numbers, expected)


def test_nobody_leaves_a_barrier_before_all_have_come(group):
    entered = [0] * group.size

    def work(communicator):
        generator = np.random.default_rng([5, communicator.rank])
        for turn in range(1, 100):
            np.ones(generator.integers(1, 20_000)).sum()  # ranks are never in step
            entered[communicator.rank] = turn
            communicator.barrier()
            if min(entered) < turn:
                return f"left barrier {turn} when {entered} had come"
        return None

    assert group.run(work) == [None] * group.size
