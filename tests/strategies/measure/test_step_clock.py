import itertools

import pytest

from kerasdist.collectives.checked import SingleCommunicator
from kerasdist.strategies.measure.step_clock import Sampling, StepClock


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


@pytest.mark.parametrize("runs", [False, True])
def test_a_clock_that_is_stopped_for_a_while_is_then_as_it_was(runs):
    clock = StepClock(["/device:CPU:0"], SingleCommunicator(), in_turn=True)
    if runs:
        clock.start()
    with clock.stopped():
        assert not clock.running
    assert clock.running is runs
    clock.stop()
