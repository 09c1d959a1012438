"""Keras's own tests of distribution pass with RingStrategy for MirroredStrategy.

They ship in the keras package. Each file runs in a process of its own, because its
`setUp` starts TensorFlow anew.
"""

import importlib.util

import pytest
from scripts import PRELUDE, RUN_TESTS
from soak import soak

from workers import Workers

_RUN = PRELUDE + "tf.distribute.MirroredStrategy = kerasdist.RingStrategy" + RUN_TESTS
SKIPPED = "::test_single_step1"  # is about tf_keras, if installed


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
    skipped = {t: "skipped" for t in outcomes if t.endswith(SKIPPED)}
    assert others == skipped, finished.output[-20_000:]
    assert len(outcomes) >= at_least, outcomes
