"""The proposed strategy, for steps whose fastest one is known."""

import dataclasses

import pytest

from kerasdist.prediction.advice import Facts, advise
from kerasdist.prediction.profile import HostLink, Profile, Stages, all_reduces_of
from kerasdist.prediction.simulation import Setup, predict

FAST, SLOW = HostLink(1e-5, 1e-10), HostLink(1e-4, 1e-6)


def facts(link, workers=4, memory=None, speeds=(), servers=1, **more):
    plain = Profile(
        rows=10,
        compute=(0.1,),
        messages=all_reduces_of([2_000_000]),
        weights=2_000_000,
        **more,
    )
    small = dataclasses.replace(plain, messages=all_reduces_of([20_000]))
    return Facts(
        profiles={"": plain, "powersgd": small},
        setup=Setup(link=link, speeds=speeds, servers=servers),
        workers=workers,
        memory=memory,
    )


def proposed(found, **options):
    best, *others = advise(found, **options)
    assert best.verdict == "proposed"
    assert all(other.verdict != "proposed" for other in others)
    assert [o.speed for o in others] == sorted((o.speed for o in others), reverse=True)
    return best.strategy.removeprefix("kerasdist."), best.workers


RING = "RingStrategy()"
STAGES = (
    Stages(1, 1, 100.0, 1.0, 0.0),
    Stages(2, 1, 60.0, 0.5, 1e3),
    Stages(2, 8, 55.0, 0.5, 1e3),
)


@pytest.mark.parametrize(
    ("found", "lossy", "expected"),
    [
        (facts(FAST), False, (RING, 4)),
        (facts(FAST, workers=6), False, (RING, 6)),
        (facts(SLOW), False, (RING, 1)),
        # Less than a twentieth more isn't worth arguments that change numbers.
        (facts(FAST), True, (RING, 4)),
        (facts(SLOW), True, ('RingStrategy(compression="powersgd")', 4)),
        (
            facts(FAST, speeds=(1, 0.5, 0.25, 0.25)),
            False,
            ('RingStrategy(balance="measured")', 4),
        ),
        (facts(FAST, memory=100.0, stages=STAGES), False, (RING, 4)),
        (
            facts(FAST, memory=70.0, stages=STAGES),
            False,
            ('RingStrategy(placement="auto", micro_batches=8)', 4),
        ),
        (
            facts(SLOW, memory=58.0, stages=STAGES),
            False,
            ('ModelParallelStrategy("auto", micro_batches=8)', 1),
        ),
    ],
)
def test_the_fastest_that_changes_least_is_proposed(found, lossy, expected):
    assert proposed(found, lossy=lossy) == expected


def test_servers_are_proposed_where_a_ring_has_too_many_messages():
    link = HostLink(5e-3, 1e-9)
    found = facts(link, workers=64, servers=16)
    assert proposed(found) == ("ParameterServerStrategy()", 64)


def test_each_other_choice_has_the_figure_by_which_it_was_ruled_out():
    best, *others = advise(facts(SLOW))
    verdicts = {(each.strategy, each.workers): each.verdict for each in others}
    ring = verdicts["kerasdist.RingStrategy()", 2]
    assert ring == f"{predict_of(2) / best.speed - 1:+.0%}: bandwidth"
    lossy = verdicts['kerasdist.RingStrategy(compression="powersgd")', 4]
    assert lossy.startswith("changes numbers; +")
    assert best.batch_size == 10
    (four, *_) = [each for each in others if each.workers == 4]
    assert four.batch_size == 40
    assert "--ps 1" in next(e.options for e in others if "Server" in e.strategy)


def predict_of(workers):
    found = facts(SLOW)
    return predict(found.profiles[""], found.setup, workers).examples_per_s


def test_nothing_is_proposed_where_nothing_fits():
    found = advise(facts(FAST, memory=10.0, stages=STAGES))
    assert all(each.predicted is None for each in found)
    assert found[0].verdict == "needs 100 B of 10 B memory"
    assert found[-1].verdict == "needs 55 B of a device's memory"


def test_workers_of_other_speeds():
    """Without a network: the slowest one's speed, their sum, and their sum."""
    free, speeds = HostLink(0.0, 0.0), (1.0, 0.5, 0.25, 0.25)
    profile = facts(free).profiles[""]

    def rate(**changes):
        setup = Setup(link=free, speeds=speeds, **changes)
        return predict(profile, setup, 4).examples_per_s

    alone = 10 / 0.1
    assert rate() == pytest.approx(4 * 0.25 * alone)
    assert rate(balance=True) == pytest.approx(2 * alone)
    assert rate(strategy="async") == pytest.approx(2 * alone, rel=0.02)
    assert rate(local_steps=4) == pytest.approx(4 * 0.25 * alone)
    assert predict(profile, Setup(link=free, speeds=speeds), 2).examples_per_s == (
        pytest.approx(2 * 0.5 * alone)
    )
    with pytest.raises(ValueError, match="Numbers must be positive"):
        rate(balance=True, servers=0)
