"""TensorFlow's own tests of strategies pass for RingStrategy.

MirroredStrategy runs the same tests beside it: what it passes, we must pass.
"""

from __future__ import annotations

import collections

import pytest

from places import SUPPORT
from workers import Workers

_SCRIPT = SUPPORT / "peers_tensorflow.py"
# Cases that MirroredStrategy passes and RingStrategy doesn't, with the reason.
EXCEPTIONS: dict[str, str] = {}


# How many cases of each class pass at least: TensorFlow may rename its methods, and
# the tests below mustn't become empty by that.
AT_LEAST = {"TwoDevices": 34, "OneDevice": 22, "Contract": 35, "OneObject": 4}


@pytest.fixture(
    scope="module",
    params=[
        "OneDevice OneObject",
        pytest.param("TwoDevices Contract", marks=pytest.mark.soak),
    ],
)
def outcomes(request: pytest.FixtureRequest) -> dict[str, dict[str, str]]:
    with Workers(
        *(_SCRIPT, 1, request.param.split()),
        env={"TF_CONFIG": None},
        deadline=170,
        handover=False,
    ) as job:
        (finished,) = job.succeed()
    return finished.result


def test_all_that_mirrored_strategy_passes(outcomes):
    worse = {
        case: of["RingStrategy"]
        for case, of in outcomes.items()
        if of["MirroredStrategy"] == "passed" != of["RingStrategy"]
    }
    assert worse.keys() == EXCEPTIONS.keys() & outcomes.keys(), _shown(worse)


def test_nothing_fails(outcomes):
    failed = {
        case: of["RingStrategy"]
        for case, of in outcomes.items()
        if of["RingStrategy"] not in ("passed", "skipped") and case not in EXCEPTIONS
    }
    assert not failed, _shown(failed)


def test_the_cases_are_there(outcomes):
    passed = collections.Counter(
        case.partition(".")[0]
        for case, of in outcomes.items()
        if of["RingStrategy"] == "passed"
    )
    assert passed
    assert all(passed[base] >= AT_LEAST[base] for base in passed), passed


def _shown(cases: dict[str, str]) -> str:
    return "\n".join(f"{case}: {text}" for case, text in cases.items())
