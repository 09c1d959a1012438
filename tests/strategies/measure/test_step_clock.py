import pytest

from kerasdist.collectives.single import SingleCommunicator
from kerasdist.strategies.measure.step_clock import StepClock


@pytest.mark.parametrize("runs", [False, True])
def test_a_clock_that_is_stopped_for_a_while_is_then_as_it_was(runs):
    clock = StepClock(["/device:CPU:0"], SingleCommunicator(), in_turn=True)
    if runs:
        clock.start()
    with clock.stopped():
        assert not clock.running
    assert clock.running is runs
    clock.stop()
