"""Keras's own tests of distribution pass with RingStrategy for MirroredStrategy.

They ship in the keras package. Each file runs in a process of its own, because its
`setUp` starts TensorFlow anew.
"""

import importlib.util

import pytest
from soak import soak

from workers import Workers

# Runs a file of tests with pytest, and prints {"<test>": "<outcome>"}.
_RUN = """
import json
import sys
import pytest
import tensorflow as tf
import kerasdist

tf.distribute.MirroredStrategy = kerasdist.RingStrategy

class Outcomes(dict):
    def pytest_runtest_logreport(self, report):
        # "call", and what failed or was skipped before or after it.
        if report.when == "call" or report.outcome != "passed":
            self[report.nodeid.split("::")[-1]] = report.outcome

outcomes = Outcomes()
pytest.main(
    [sys.argv[1], "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", "/"],
    [outcomes],
)
print("RESULT", json.dumps(outcomes), flush=True)
"""

SKIPPED = {"test_single_step1"}  # is about tf_keras, if installed


@pytest.mark.parametrize(
    ("file", "at_least"),
    [soak("distribute_test", 7), ("optimizer_distribute_test", 10)],
)
def test_keras_own(file, at_least):
    spec = importlib.util.find_spec(f"keras.src.backend.tensorflow.{file}")
    if spec is None:
        pytest.skip(f"this Keras ships without {file}")
    args, env = [str(spec.origin)], {"TF_CONFIG": None}
    (finished,) = Workers(_RUN, 1, args, env=env, deadline=170, handover=False).run()
    outcomes = finished.result
    others = {t: outcome for t, outcome in outcomes.items() if outcome != "passed"}
    skipped = dict.fromkeys(SKIPPED & outcomes.keys(), "skipped")
    assert others == skipped, finished.output[-20_000:]
    assert len(outcomes) >= at_least, outcomes
