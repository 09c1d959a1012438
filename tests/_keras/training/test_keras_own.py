"""Keras's own tests of distribution pass with RingStrategy for MirroredStrategy.

They ship in the keras package. Each file runs in a process of its own, because its
`setUp` starts TensorFlow anew.
"""

from __future__ import annotations

import importlib.util

import pytest

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

# Of each file: how many tests there are at least, and which don't pass, with the
# outcome and the reason.
FILES: dict[str, tuple[int, dict[str, tuple[str, str]]]] = {
    "distribute_test": (7, {}),
    "optimizer_distribute_test": (
        10,
        {"test_single_step1": ("skipped", "it is about tf_keras, if installed")},
    ),
}


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=pytest.mark.soak if file == "distribute_test" else [])
        for file in FILES
    ],
)
def test_keras_own(file):
    name = f"keras.src.backend.tensorflow.{file}"
    spec = importlib.util.find_spec(name)
    if spec is None:
        pytest.skip(f"this Keras ships without {name}")
    with Workers(
        *(_RUN, 1, [str(spec.origin)]),
        env={"TF_CONFIG": None},
        deadline=170,
        handover=False,
    ) as job:
        (finished,) = job.succeed()
    outcomes = finished.result
    at_least, exceptions = FILES[file]
    expected = {test: outcome for test, (outcome, _) in exceptions.items()}
    others = {t: outcome for t, outcome in outcomes.items() if outcome != "passed"}
    assert others == expected, finished.output[-20_000:]
    assert len(outcomes) >= at_least, outcomes
