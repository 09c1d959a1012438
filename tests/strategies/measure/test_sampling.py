import itertools

import pytest

from kerasdist.strategies.measure.step_clock import Sampling


def calls(sampling, count):
    measured, warming = [], []
    for number in range(count):
        if not sampling.next():
            continue
        (warming if sampling.warming else measured).append(number)
    return measured, warming


@pytest.mark.parametrize(("row", "number"), [(8, 9), (8, 20), (8, 150), (3, 15)])
def test_rows_by_chance_and_the_same_everywhere(row, number):
    chosen = []
    for _ in range(2):
        sampling = Sampling()
        sampling.set(row, number)
        chosen.append(calls(sampling, number * 1000))
    assert chosen[0] == chosen[1]
    measured, warming = chosen[0]
    assert warming[0] >= 1
    assert len(warming) == pytest.approx(1000, rel=0.1)
    # Behind each that warms up the rest of a row.
    rest = [first + behind for first in warming for behind in range(1, row)]
    assert measured == [one for one in rest if one < number * 1000]
    gaps = [b - a for a, b in itertools.pairwise(warming)]
    assert min(gaps) >= row
    assert len(set(gaps)) >= min(number - row, 20)
