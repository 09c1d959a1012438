"""Evaluations and predictions that are begun again after a change of the workers."""

from __future__ import annotations

import pytest

from places import SUPPORT
from workers import Workers

pytestmark = pytest.mark.timeout(400)

SCRIPT = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
"""
SCRIPT += """
import json
import keras
import numpy as np
import kerasdist
from elastic_double import ElasticDouble
from keras import layers

strategy = kerasdist.RingStrategy(timeout=60)
double = ElasticDouble(strategy)
rng = np.random.default_rng(0)
x = rng.normal(size=(70, 6)).astype("float32")
y = (x.sum(1) > 0).astype("int64")
keras.utils.set_random_seed(7)
with strategy.scope():
    m = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
    m.compile(
        "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"], jit_compile=False,
    )

def run(call, fail_at=()):
    double.begin(fail_at)
    first = double.epoch
    result = call()
    return {
        "result": np.asarray(result).tolist(),
        "changes": double.epoch - first,
        "collectives": double.count,
    }

found = {}
for name, call in {
    "evaluate": lambda: m.evaluate(x, y, batch_size=16, verbose=0),
    "predict": lambda: m.predict(x, batch_size=16, verbose=0),
    "test_on_batch": lambda: m.test_on_batch(x[:10], y[:10]),
    "predict_on_batch": lambda: m.predict_on_batch(x[:10]),
}.items():
    call()  # the first time variables are created, by collectives
    calm = run(call)
    last = calm["collectives"] - 1
    # The second failure is in the repetition, at the same collective.
    found[name] = calm, run(call, [last, 2 * last + 1])
print("RESULT", json.dumps(found), flush=True)
"""


def test_they_are_begun_again():
    with Workers(SCRIPT, 2, deadline=300) as job:
        first, second = (finished.result for finished in job.succeed())
    for name, (calm, hit) in first.items():
        assert calm["collectives"] > 0, name
        assert (calm["changes"], hit["changes"]) == (0, 2), name
        assert hit["result"] == calm["result"], name
        assert second[name][1]["result"] == hit["result"], name
