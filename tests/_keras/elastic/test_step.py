"""Steps that are repeated after a change of the workers: the numbers stay the same.

Other steps, with real losses, are in `test_elastic_moments`.
"""

import pytest
from scripts import PRELUDE

from places import SUPPORT
from workers import Workers

pytestmark = [pytest.mark.timeout(400), pytest.mark.soak]

SCRIPT = f"{PRELUDE}\nsys.path.insert(0, {str(SUPPORT)!r})\n"
SCRIPT += """
from elastic_double import ElasticDouble
from keras import layers

strategy = kerasdist.RingStrategy(["CPU:0"], timeout=60)
double = ElasticDouble(strategy)
rng = np.random.default_rng(0)
x = rng.normal(size=(70, 6)).astype("float32")
y = (x.sum(1) > 0).astype("int64")
entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

def digest(variables):
    values = [np.ascontiguousarray(v) for v in variables]
    return hashlib.sha256(b"".join(v.tobytes() for v in values)).hexdigest()

def run(train, fail_at=()):
    strategy.communicator.step = 0
    keras.utils.set_random_seed(7)
    double.begin(fail_at)
    first = double.epoch
    found = train()
    found["changes"] = double.epoch - first
    found["sections"] = double.sections
    found["collectives"] = double.count
    return found

# Two epochs of batches of 16, the last of 6. What a step keeps: statistics, seeds,
# gradients of the step before, and averages of weights.
def train():
    with strategy.scope():
        m = keras.Sequential([
            keras.Input((6,)), layers.Dense(8, use_bias=False),
            layers.BatchNormalization(),
            layers.Dropout(0.3), layers.Dense(2)])
        m.compile(
            keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, use_ema=True),
            entropy, metrics=["accuracy"], jit_compile=False)
    history = m.fit(x, y, batch_size=16, epochs=2, verbose=0).history
    return {
        "weights": digest(v.numpy() for v in m.variables),
        "optimizers": digest(v.numpy() for v in m.optimizer.variables),
        "iterations": int(m.optimizer.iterations),
        "history": history,
        "step": strategy.communicator.step,
    }

# Runs without a failure, and with some: at the first step's first collective,
# in the middle of a step, at a step's last one, in the reading of the metrics.
calm = run(train)
firsts = [first for first, _ in calm["sections"]]
# The last section is the last epoch's reading.
in_step, reading = firsts[3] + (firsts[4] - firsts[3]) // 2, firsts[-1]
# Each failure repeats what its section had begun, which counts, too.
last_of_step = firsts[5] - 1
points = [0, in_step, last_of_step, reading]
shifted, repeated = [], 0
for point in points:
    shifted.append(point + repeated)
    section = max(first for first in firsts if first <= point)
    repeated += point - section + 1
hit = run(train, shifted)
result([calm, hit])
"""


def test_a_model_with_statistics_masks_and_metrics():
    found = Workers(SCRIPT, 2, deadline=300).results()
    for calm, hit in found:
        assert calm["changes"] == 0
        assert hit["changes"] == 4
        assert [failed for _, failed in hit["sections"]].count(True) == 4
        for same in ("weights", "optimizers", "iterations", "step"):
            assert hit[same] == calm[same], same
        assert hit["history"].keys() == calm["history"].keys()
        for name, values in calm["history"].items():
            # The workers' parts are added up in another order.
            assert hit["history"][name] == pytest.approx(values, rel=1e-6), name
    assert found[0][1]["history"] == found[1][1]["history"]
