"""Windows of steps: how long they are, and that all workers' are equally long."""

import pytest

from kerasdist.callbacks.job_view import Windows
from kerasdist.strategies.measure.communication import StepTimes


def length(windows):
    """Calls until this window is full."""
    while windows.left:
        windows.calls += 1
    return windows.calls


def times(steps, seconds):
    return StepTimes(rank=0, steps=steps, seconds=seconds)


@pytest.mark.parametrize(
    ("steps", "per_call", "expected"), [(1, 1, 1), (8, 1, 8), (8, 3, 2), (2, 4, 1)]
)
def test_so_many_steps(steps, per_call, expected):
    windows = Windows(steps, per_call)
    for _ in range(2):
        assert length(windows) == expected
        windows.begin(times(100, 1.0), [expected, 9.0, 9.0])
        assert windows.calls == 0


@pytest.mark.parametrize(
    ("cost", "age", "seconds"),
    [
        (0.0, 20.0, 1.0),  # a part of the job's age,
        (0.0, 2_000.0, 5.0),  # but not more than it takes to see something,
        (0.1, 2_000.0, 50.0),  # unless that cost too much,
        (0.0, 0.01, 0.1),  # and at least ten calls.
    ],
)
@pytest.mark.parametrize("per_call", [1, 4])
def test_a_length_that_is_left_to_the_callback(cost, age, seconds, per_call):
    windows = Windows("auto", per_call)
    assert length(windows) == 10
    # A hundredth of a second per call.
    windows.begin(times(100 * per_call, 1.0), [100, cost, age])
    assert length(windows) == round(seconds * 100)


def test_what_the_chief_tells_makes_all_equal():
    now = iter([0.0, 4.0, 4.0]).__next__
    chief, other = Windows("auto", now=now), Windows("auto")
    chief.calls = 10
    chief.cost(0.01)
    chief.cost(0.001)
    assert chief.state() == [10.0, 0.005, 4.0]
    assert other.state()[:2] == [0.0, 0.0]
    state = chief.state()
    for windows in (chief, other):
        windows.begin(times(10, 0.1), state)
    assert length(chief) == length(other) == 250
