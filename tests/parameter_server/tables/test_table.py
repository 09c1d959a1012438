"""One server's part of a table, beside plain numpy."""

from __future__ import annotations

import numpy as np
import pytest

from kerasdist import errors
from kerasdist.parameter_server import Layout, Variable
from kerasdist.parameter_server.served_table import Table, merge_rows

VARIABLES = [
    Variable(name="kernel", shape=(300, 400)),
    Variable(name="embedding", shape=(50, 4), sparse=True),
    Variable(name="bias", shape=(7,), dtype="float64"),
    Variable(name="half", shape=(3, 2), dtype="float16"),
    Variable(name="words", shape=(20, 2, 3), dtype="float64", sparse=True),
]
LAYOUT = Layout(VARIABLES, 1)


def changes(seed):
    """A random change of the whole table, as it arrives."""
    generator = np.random.default_rng(seed)
    parts = [generator.normal(size=120_006).astype("float32"), generator.normal(size=7)]
    for rows, width, dtype in ((50, 4, "float32"), (20, 6, "float64")):
        count = int(generator.integers(0, 6))
        indices = np.sort(generator.choice(rows, count, replace=False))
        values = generator.normal(size=(count, width)).astype(dtype)
        parts += [indices.astype("int32"), values]
    return parts


def test_additions_equal_numpys_and_rows_have_versions():
    table = Table(LAYOUT, 0)
    expected = [array.copy() for array in (*table.dense, *table.rows)]
    history = []
    for seed in range(30):
        parts = changes(seed)
        table.check(parts)
        out = [np.empty_like(array) for array in table.dense] if seed % 2 else None
        table.add(parts, out)
        expected[0] += parts[0]
        expected[1] += parts[1]
        for place in (0, 1):
            indices, values = parts[2 + 2 * place], parts[3 + 2 * place]
            np.add.at(expected[2 + place], indices, values)
        history.append([set(parts[2].tolist()), set(parts[4].tolist())])
        read = [np.empty_like(array) for array in table.dense]
        table.read(read)
        for mine, array in zip([*read, *table.rows], expected, strict=True):
            np.testing.assert_array_equal(mine, array)
        if out is not None:
            for mine, array in zip(out, read, strict=True):
                np.testing.assert_array_equal(mine, array)
        assert table.version == seed + 1
        for since in (0, seed // 2, seed, seed + 1):
            for place, found in enumerate(table.changed(since)):
                touched = set().union(*(step[place] for step in history[since:]), set())
                assert set(found.tolist()) == touched


def test_loading_counts_as_a_change_of_all_rows():
    table = Table(LAYOUT, 0)
    values = [np.ones(v.shape, v.dtype) for v in VARIABLES]
    table.load(LAYOUT.cut(0, values))
    assert all((array == 1).all() for array in (*table.dense, *table.rows))
    assert [indices.size for indices in table.changed(0)] == [50, 20]
    assert [indices.size for indices in table.changed(1)] == [0, 0]
    assert table.nbytes == LAYOUT.server_bytes()[0]


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_one_index_are_summed(seed):
    generator = np.random.default_rng(seed)
    count = int(generator.integers(0, 200))
    indices = generator.integers(0, 30, size=count)
    values = generator.integers(-9, 9, size=(count, 3)).astype("float32")
    merged, summed = merge_rows(indices, values)
    expected = np.zeros((30, 3), "float32")
    np.add.at(expected, indices, values)
    dense = np.zeros((30, 3), "float32")
    dense[merged] = summed
    assert merged.tolist() == sorted(set(indices.tolist()))
    np.testing.assert_array_equal(dense, expected)


@pytest.mark.parametrize(
    ("place", "part"),
    [
        (0, np.zeros(5, "float32")),
        (0, np.zeros(120_006, "float64")),
        (2, np.array([3, 3], "int32")),
        (2, np.array([4, 3], "int32")),
        (2, np.array([-1, 3], "int32")),
        (2, np.array([3, 50], "int32")),
        (2, np.array([3.0, 4.0])),
        (2, np.array([[3, 4]], "int32")),
        (3, np.zeros((2, 5), "float32")),
        (3, np.zeros((3, 4), "float32")),
        (3, np.zeros((2, 4), "float64")),
    ],
)
def test_changes_that_do_not_fit_are_refused(place, part):
    table = Table(LAYOUT, 0)
    parts = changes(1)
    parts[2:4] = np.array([3, 4], "int32"), np.zeros((2, 4), "float32")
    table.check(parts)
    parts[place] = part
    with pytest.raises(errors.ProtocolError, match="fit"):
        table.check(parts)
    with pytest.raises(errors.ProtocolError, match="number of parts"):
        table.check([*changes(1), np.zeros(1)])
    with pytest.raises(errors.ProtocolError, match=r"^The values don't fit"):
        table.load([])
