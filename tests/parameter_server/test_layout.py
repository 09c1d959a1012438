import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kerasdist.parameter_server import Layout, Variable

SHAPES = st.one_of(
    st.lists(st.integers(0, 40), max_size=3).map(tuple),
    st.tuples(st.integers(1000, 20_000)),
    st.tuples(st.integers(1000, 20_000), st.integers(0, 40)),
)
DTYPES = st.sampled_from(["float16", "float32", "float64"])
VARIABLES = st.lists(st.tuples(SHAPES, DTYPES, st.booleans()), max_size=20).map(
    lambda found: [
        Variable(name=f"v{i}", shape=shape, dtype=dtype, sparse=sparse and shape != ())
        for i, (shape, dtype, sparse) in enumerate(found)
    ]
)


@settings(max_examples=40)
@given(VARIABLES, st.integers(1, 5))
def test_every_row_is_on_one_server_and_bytes_are_even(variables, servers):
    layout = Layout(variables, servers)
    for index, variable in enumerate(variables):
        pieces = [p for p in layout.pieces if p.variable == index]
        covered = [row for p in pieces for row in range(p.start, p.stop)]
        assert covered == list(range(variable.rows))
    total = sum(v.rows * v.row_bytes for v in variables)
    loads = layout.server_bytes()
    assert sum(loads) == total
    # A piece is at most a fair share (or what isn't worth cutting, or one row), so
    # nobody has twice as much.
    largest = max([4096, total / servers, *(v.row_bytes for v in variables)])
    assert max(loads) <= total / servers + largest
    for server in range(servers):
        for name, pieces in layout.dense(server).items():
            end = 0
            for piece in pieces:
                assert piece.offset == end
                end += layout.elements(piece)
                assert layout.variables[piece.variable].held == name


def test_differences_are_named():
    variables = [
        Variable(name="rows", shape=(1000, 3), sparse=True),
        Variable(name="scalar", shape=(), dtype="float64"),
        Variable(name="half", shape=(7, 2), dtype="float16"),
    ]
    layout = Layout(variables, 2)
    assert layout.difference(Layout(variables, 2)) == ""
    assert layout.difference(Layout(variables, 3)) == "2 servers, the other 3"
    assert "variables, the other" in layout.difference(Layout(variables[1:], 2))
    changed = [*variables[:-1], Variable(name="other", shape=(3,))]
    assert "'other'" in layout.difference(Layout(changed, 2))
    assert Layout(changed, 2).fingerprint != layout.fingerprint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (2,), "dtype": "int32"}, "dtype='int32'; expected one of"),
        ({"shape": (-2,)}, r"shape=\(-2,\); expected integers >= 0"),
        ({"shape": (), "sparse": True}, "sparse=True for a scalar"),
    ],
)
def test_variables_are_checked(arguments, message):
    with pytest.raises(ValueError, match=f"^Variable 'a' can't be held.*{message}"):
        Variable(name="a", **arguments)


def test_values_are_checked():
    layout = Layout([Variable(name="a", shape=(2, 3))], 1)
    with pytest.raises(ValueError, match=r"'a': \(3, 2\), expected \(2, 3\)"):
        layout.check([np.zeros((3, 2))])
    with pytest.raises(ValueError, match="0 arrays, expected 1"):
        layout.check([])
    with pytest.raises(ValueError, match=r"^There must be a server"):
        Layout([], 0)
