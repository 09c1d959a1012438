"""`Sampling`: how many calls are measured, and which."""

from __future__ import annotations

import itertools

import pytest

from kerasdist.strategies.measure.step_clock import Sampling, rows_for


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, (0, 0)),
        (0.001, (8, 500)),
        (0.0125, (8, 40)),
        (0.0199, (8, 40)),
        (0.02, (3, 25)),
        (0.0625, (3, 15)),
        (0.1, (0, 0)),
        (3.0, (0, 0)),
    ],
)
def test_rows_for(seconds, expected):
    """One each half second, and one call of five at most; of long ones all."""
    assert rows_for(seconds) == expected


def calls(sampling, count):
    """Numbers of the calls that are measured, and of those that warm up."""
    measured, warming = [], []
    for number in range(count):
        if not sampling.next():
            continue
        (warming if sampling.warming else measured).append(number)
    return measured, warming


@pytest.mark.parametrize("rows", [None, (0, 0), (8, 3), (8, 8)])
def test_all_are_measured(rows):
    sampling = Sampling()
    if rows is not None:
        sampling.set(*rows)
    assert calls(sampling, 100) == (list(range(100)), [])


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


def test_calls_that_somebody_asks_for():
    plain, sampling = Sampling(), Sampling()
    for each in (plain, sampling):
        each.set(8, 150)
    chosen, found = calls(plain, 1000), []
    for number in range(1000):
        sampling.next(asked=number % 100 < 4)
        found.append((sampling.measured, sampling.warming))
    for number, (measured, warming) in enumerate(found):
        usual = number in chosen[0] or number in chosen[1]
        # Those that are chosen stay the same.
        assert measured == (usual or number % 100 < 4)
        # The graph that measures warms up where it comes after the other one.
        if not usual:
            assert warming == (number > 0 and measured and not found[number - 1][0])
    # All are measured as long as nobody has said how long they take.
    sampling = Sampling()
    sampling.next(asked=True)
    assert sampling.measured
    assert not sampling.warming
