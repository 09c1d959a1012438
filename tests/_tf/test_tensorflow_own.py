"""TensorFlow's own tests of strategies pass for RingStrategy.

MirroredStrategy runs the same tests beside it: what it passes, we must pass.
"""

import collections

import pytest
from soak import soak

from places import SUPPORT
from workers import Workers

_SCRIPT = SUPPORT / "peers_tensorflow.py"
# Cases that RingStrategy doesn't pass, with the reason.
EXCEPTIONS: dict[str, str] = {}


# How many cases of each class pass at least: TensorFlow may rename its methods, and
# the tests below mustn't become empty by that.
AT_LEAST = {"TwoDevices": 32, "OneDevice": 22, "Contract": 18, "OneObject": 4}


@pytest.mark.parametrize(
    "classes", ["OneDevice OneObject", soak("TwoDevices Contract")]
)
def test_all_that_mirrored_strategy_passes(classes):
    args, env = classes.split(), {"TF_CONFIG": None}
    job = Workers(_SCRIPT, 1, args, env=env, deadline=170, handover=False)
    (outcomes,) = job.results()
    worse = {
        case: of["RingStrategy"]
        for case, of in outcomes.items()
        if of["RingStrategy"] not in ("passed", "skipped")
        or of["MirroredStrategy"] == "passed" != of["RingStrategy"]
    }
    shown = "\n".join(f"{case}: {text}" for case, text in worse.items())
    assert worse.keys() == EXCEPTIONS.keys() & outcomes.keys(), shown
    passed = collections.Counter(
        case.partition(".")[0]
        for case, of in outcomes.items()
        if of["RingStrategy"] == "passed"
    )
    assert passed.keys() == {*args}
    assert all(passed[base] >= AT_LEAST[base] for base in passed), passed
