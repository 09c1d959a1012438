"""What workers have measured, put together: pure functions of numbers."""

import pytest

from kerasdist.callbacks.summaries import PHASES, combine
from kerasdist.strategies.measure.communication import StepTimes


def times(rank, *, steps=10, rows=100, **parts):
    """Sums over the steps; `exchange` and the like are seconds of one step."""
    whole = {
        name: value if name == "sent" else value * steps
        for name, value in parts.items()
    }
    inside = ("input", "compute", "pack", "exchange", "update", "outside")
    seconds = sum(whole.get(name, 0.0) for name in inside)
    return StepTimes(rank=rank, steps=steps, rows=rows, seconds=seconds, **whole)


def test_workers_in_step():
    figures = combine(
        [
            times(0, compute=0.02, exchange=0.05, update=0.01, sent=400),
            times(1, compute=0.05, exchange=0.02, update=0.01, sent=200),
        ],
        link=1e9,
        baseline=100.0,
    )
    assert figures.workers == 2
    assert figures.steps == 10
    assert figures.examples_per_second == pytest.approx(200 / 0.8)
    assert figures.by_rank == pytest.approx({0: 125, 1: 125})
    assert figures.efficiency == pytest.approx(250 / 200)
    assert figures.step_seconds == pytest.approx(0.08)
    # Who communicates 30 ms longer than the other waits for it.
    assert figures.phases["wait"] == pytest.approx(0.03 / 2)
    assert figures.phases["communicate"] == pytest.approx(0.02)
    assert figures.phases["compute"] == pytest.approx(0.035)
    assert sum(figures.phases.values()) == pytest.approx(figures.step_seconds)
    assert figures.share("compute", "update") == pytest.approx(0.045 / 0.08)
    assert figures.busy == pytest.approx({0: 0.03, 1: 0.06})
    assert (figures.slowest, figures.slow_part) == (1, "compute")
    assert figures.lag == pytest.approx(0.03)
    assert figures.global_batch == 20
    assert figures.bytes_per_step == 30
    assert list(figures.phases) == list(PHASES)


def test_who_knows_that_the_others_came_late():
    """Each is late now and then: on average nobody communicates longer."""
    both = [times(r, compute=0.02, exchange=0.05, late=0.04) for r in range(2)]
    figures = combine(both)
    assert figures.phases["wait"] == pytest.approx(0.04)
    assert figures.phases["communicate"] == pytest.approx(0.01)
    assert figures.lag == pytest.approx(0)
    # It can't be more than the whole.
    figures = combine([times(0, exchange=0.01, late=0.04), times(1, exchange=0.01)])
    assert figures.phases["wait"] == pytest.approx(0.005)


def test_workers_apart():
    figures = combine(
        [
            times(0, steps=30, rows=300, compute=0.01, exchange=0.01),
            times(1, steps=10, rows=100, compute=0.05, exchange=0.01),
        ],
        in_step=False,
        staleness={0: 5, 3: 35},
    )
    assert figures.steps == 40
    assert figures.global_batch == 10
    assert figures.examples_per_second == pytest.approx(400 / 0.6)
    assert figures.by_rank == pytest.approx({0: 500, 1: 100 / 0.6})
    assert figures.phases["compute"] == pytest.approx((0.3 + 0.5) / 40)
    assert (figures.slowest, figures.slow_part) == (1, "compute")
    assert figures.lag == pytest.approx(0.04)
    assert figures.staleness == {0: 5, 3: 35}


def test_the_lag_is_behind_the_median():
    busy = [0.01, 0.02, 0.09, 0.03]
    figures = combine([times(r, input=b) for r, b in enumerate(busy)])
    assert figures.slowest == 2
    assert figures.slow_part == "input"
    assert figures.lag == pytest.approx(0.07)


def test_bandwidth_is_that_of_who_waits_least():
    figures = combine(
        [
            times(0, exchange=0.05, sent=1000, communicating=0.05),
            times(1, exchange=0.02, sent=1000, communicating=0.02),
        ]
    )
    assert figures.bandwidth == pytest.approx(1000 / 0.2)


def test_one_worker_and_none():
    figures = combine([times(3, compute=0.1)], baseline=200.0)
    assert (figures.slowest, figures.lag, figures.slow_part) == (None, 0, "")
    assert figures.efficiency == pytest.approx(0.5)
    assert figures.bandwidth == 0
    # Nobody took a step.
    assert combine([StepTimes(rank=0), StepTimes(rank=1)]) is None
