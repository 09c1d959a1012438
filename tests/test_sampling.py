"""`Sampling`: how many calls are measured, and which."""

from __future__ import annotations

import itertools

import pytest

from kerasdist.strategies.sampling import Sampling, period


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.1, 0), (0.02, 0), (0.0125, 40), (0.001, 500), (0.0, 0)],
)
def test_period(seconds, expected):
    assert period(seconds) == expected


def calls(sampling, count):
    """Numbers of the calls that are measured, and of those that warm up."""
    measured, warming = [], []
    for number in range(count):
        if not sampling.next():
            continue
        (warming if sampling.warming else measured).append(number)
    return measured, warming


@pytest.mark.parametrize("number", [None, 0, 3, 8])
def test_all_are_measured(number):
    sampling = Sampling()
    if number is not None:
        sampling.set(number)
    assert calls(sampling, 100) == (list(range(100)), [])


@pytest.mark.parametrize("number", [9, 20, 150])
def test_rows_by_chance_and_the_same_everywhere(number):
    chosen = []
    for _ in range(2):
        sampling = Sampling()
        sampling.set(number)
        chosen.append(calls(sampling, number * 1000))
    assert chosen[0] == chosen[1]
    measured, warming = chosen[0]
    assert warming[0] >= 1
    assert len(warming) == pytest.approx(1000, rel=0.1)
    # Behind each that warms up a row of seven.
    row = [first + behind for first in warming for behind in range(1, 8)]
    assert measured == [one for one in row if one < number * 1000]
    gaps = [b - a for a, b in itertools.pairwise(warming)]
    assert min(gaps) >= 8
    assert len(set(gaps)) >= min(number - 8, 20)


def test_calls_that_somebody_asks_for():
    plain, sampling = Sampling(), Sampling()
    for each in (plain, sampling):
        each.set(150)
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
