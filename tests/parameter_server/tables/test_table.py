import numpy as np
import pytest

from kerasdist import errors
from kerasdist.parameter_server import Layout, Variable
from kerasdist.parameter_server.served_table import Clocks, Table

VARIABLES = [
    Variable(name="kernel", shape=(300, 400)),
    Variable(name="embedding", shape=(50, 4), sparse=True),
    Variable(name="bias", shape=(7,), dtype="float64"),
    Variable(name="half", shape=(3, 2), dtype="float16"),
    Variable(name="words", shape=(20, 2, 3), dtype="float64", sparse=True),
]
LAYOUT = Layout(VARIABLES, 1)


def changes(seed):
    generator = np.random.default_rng(seed)
    parts = [generator.normal(size=120_006).astype("float32"), generator.normal(size=7)]
    for rows, width, dtype in ((50, 4, "float32"), (20, 6, "float64")):
        count = int(generator.integers(0, 6))
        indices = np.sort(generator.choice(rows, count, replace=False))
        values = generator.normal(size=(count, width)).astype(dtype)
        parts += [indices.astype("int32"), values]
    return parts


@pytest.mark.parametrize(
    ("place", "part"),
    [
        (0, np.zeros(5, "float32")),
        (0, np.zeros(120_006, "float64")),
        *(
            (2, np.array([a, b], "int32"))
            for a, b in ((3, 3), (4, 3), (-1, 3), (3, 50))
        ),
        (2, np.array([3.0, 4.0])),
        (2, np.array([[3, 4]], "int32")),
        *((3, np.zeros(shape, "float32")) for shape in ((2, 5), (3, 4))),
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


def test_clocks_never_go_back_and_those_of_lost_workers_are_forgotten():
    clocks = Clocks(range(3), 1)
    for rank, clock in ((0, 8), (0, 2), (1, 9), (5, 2)):
        clocks.tick(rank, clock)
    assert clocks.live == {0: 8, 1: 9, 2: 0}
    assert not clocks.may_read(1, 9)
    assert (clocks.drop(2), clocks.drop(2)) == (0, None)
    assert clocks.may_read(1, 9)


def test_a_joiner_begins_at_the_least_live_clock():
    clocks = Clocks(range(2), 1)
    clocks.tick(0, 8)
    clocks.tick(1, 9)
    assert (clocks.join(2), clocks.join(2, 4), clocks.join(7)) == (8, 4, 4)
    assert Clocks([], None).join(0) == 0
