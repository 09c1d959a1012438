import ml_dtypes
import numpy as np
import pytest
from test_communicator import same_bytes

from groups import Group
from kerasdist.collectives.row_exchange import Slices
from kerasdist.errors import CollectiveMismatch

BF16 = np.dtype(ml_dtypes.bfloat16)
TABLES = [
    ("float32", "int64", (8,)),
    ("float16", "int32", (3,)),
    (BF16, "int64", (2, 2)),
    ("float64", "int32", ()),
]


def slices_of(rank, count, rows=0, seed=0):
    """Each table's slices of a rank; small whole numbers, so all sums are exact."""
    found = []
    for place, (values, indices, shape) in enumerate(TABLES):
        rng = np.random.default_rng([seed, rank, place])
        number = count + place if count else 0
        chosen = rng.integers(0, 50, number)
        if rows:
            chosen = rng.permutation(rows)[:number]
        given = rng.integers(-4, 5, (len(chosen), *shape)).astype(values)
        found.append(Slices(given, chosen.astype(indices), rows))
    return found


COUNTS = [(5, 0, 3, 7, 1), (0,) * 5, (4000, 3000, 1, 0, 9)]


@pytest.mark.parametrize("counts", COUNTS)
def test_slices_of_all_ranks_in_rank_order(group, counts):
    check_rank_order(group, counts, lend=False)
    check_whole_tables(group, lend=False)


@pytest.mark.parametrize("size", [2, 3])
def test_results_in_lent_memory_are_the_same(size):
    with Group("shared", size) as made:
        for counts in COUNTS:
            check_rank_order(made, counts, lend=True)
        check_whole_tables(made, lend=True)


def check_rank_order(group, counts, *, lend):
    given = [slices_of(r, counts[r % 5]) for r in range(group.size)]
    beside = [np.float32(2.5), np.arange(3, dtype="int64")]

    results = group.run(
        lambda c: c.exchange_rows(given[c.rank], sums=beside, lend=lend)
    )

    assert same_bytes(results)
    for place in range(len(TABLES)):
        parts = [tables[place] for tables in given]
        values, indices = results[0][2 * place : 2 * place + 2]
        assert values.dtype == parts[0].values.dtype
        assert indices.dtype == parts[0].indices.dtype
        np.testing.assert_array_equal(values, np.concatenate([p.values for p in parts]))
        np.testing.assert_array_equal(
            indices, np.concatenate([p.indices for p in parts])
        )
    assert results[0][8] == 2.5 * group.size
    assert results[0][8].shape == ()
    np.testing.assert_array_equal(results[0][9], np.arange(3) * group.size)


@pytest.mark.parametrize("known", [False, True])
def test_weights_and_a_rank_without_rows(group, known):
    """A rank with weight 0 adds nothing, even if its arrays hold NaN."""
    weights = [0 if r == 1 else 2**r for r in range(group.size)]
    total = sum(weights)

    def work(c):
        weight = weights[c.rank]
        value = np.nan if weight == 0 else 8.0
        tables = [
            Slices(np.full((3, 2), value, d), np.arange(3) + c.rank)
            for d in ("float32", "float16", "float64")
        ]
        means = [np.full(4, value, "float32"), np.float16(value)]
        known_total = (total,) if known else ()
        return c.exchange_rows(tables, weight, *known_total, means=means)

    results = group.run(work)

    assert same_bytes(results)
    present = [r for r in range(group.size) if weights[r]]
    for place in range(3):
        values, indices = results[0][2 * place : 2 * place + 2]
        assert indices.tolist() == [i + r for r in present for i in range(3)]
        expected = np.repeat([8 * weights[r] / total for r in present], 3)
        np.testing.assert_allclose(values[:, 0], expected, rtol=1e-3)
    np.testing.assert_allclose(results[0][6], np.full(4, 8.0), rtol=1e-6)
    assert results[0][7].dtype == np.float16
    np.testing.assert_allclose(results[0][7], 8.0)


def check_whole_tables(group, *, lend):
    """A table is summed as a whole where that is less than its slices."""
    given = [slices_of(r, 7, rows=10) for r in range(group.size)]
    few = [slices_of(r, 7, rows=1000) for r in range(group.size)]

    results = group.run(
        lambda c: c.exchange_rows([*given[c.rank], *few[c.rank]], lend=lend)
    )

    assert same_bytes(results)
    for place in range(4):
        expected = np.zeros((10, *TABLES[place][2]))
        for tables in given:
            np.add.at(expected, tables[place].indices, tables[place].values)
        values, indices = results[0][2 * place : 2 * place + 2]
        if group.size > 1:
            assert indices.tolist() == list(range(10))
        dense = np.zeros_like(expected)
        np.add.at(dense, indices, values)
        np.testing.assert_array_equal(dense, expected)
        assert len(results[0][9 + 2 * place]) == group.size * (7 + place)


def test_one_with_double_indices_keeps_the_table_from_being_summed(group):
    def work(c):
        last = c.rank == c.size - 1
        indices = np.array([1, 1, 1]) if last else np.arange(3)
        return c.exchange_rows([Slices(np.ones((3, 4)), indices, 0 if last else 3)])

    values, _ = group.run(work)[0]
    assert len(values) == 3 * group.size


@pytest.mark.parametrize("kind", ["unix", "shared"])
def test_ranks_that_disagree_on_weights_are_told(kind):
    """The same bytes are sent with and without weights, so these are compared."""

    def work(c):
        mine = Slices(np.ones((2, 3), "float32"), np.arange(2))
        with pytest.raises(CollectiveMismatch):
            c.exchange_rows([mine], *([3] if c.rank else []))
        return c.rank

    with Group(kind, 2) as made:
        assert made.run(work) == [0, 1]
