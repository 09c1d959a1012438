"""Placed models are where they belong, and compute what they compute unplaced.

Where operations were is what the runtime's metadata say, see `placement_zoo`.
"""

import json

import numpy as np
import pytest
from devices import begin

from placement_zoo import COUNTS
from places import SCRIPTS_PATH
from workers import Workers

pytestmark = pytest.mark.timeout(300)

SCRIPT = begin(3)
SCRIPT += """
sys.path[:0] = os.environ["TESTS"].split(os.pathsep)
import placement_zoo as zoo

def place(kind, count, gradients=True):
    devices = [f"CPU:{i}" for i in range(count)]
    strategy = kerasdist.ModelParallelStrategy(
        zoo.placement(kind, devices), devices=devices
    )
    strategy.extended.kerasdist.places_gradients = gradients
    def stage(index):
        return strategy.stage(devices[min(index, count - 1)])
    with zoo.run_metadata() as graphs:
        found = zoo.numbers(kind, strategy.scope, stage)
    return devices, graphs, found

for name, count in json.loads(os.environ["COUNTS"]).items():
    kind = zoo.ZOO[name]
    plain = zoo.plain_numbers(name, os.environ["PLAIN"])
    devices, graphs, found = place(kind, count)
    model = found.pop("model")
    backward, wrong = zoo.misplaced(graphs, devices)
    differ = [
        f"{mine} {np.max(np.abs(found[mine] - plain[theirs]))}"
        for mine, theirs in zip(found, plain, strict=True)
        if not (
            np.array_equal(found[mine], plain[theirs])
            if kind.exact
            else np.allclose(found[mine], plain[theirs], rtol=1e-5, atol=1e-6)
        )
    ]
    print("RESULT", json.dumps({
        "name": name,
        "count": count,
        "backward": backward,
        "misplaced": wrong[:10],
        "variables": zoo.misplaced_variables(model, devices)[:10],
        "moved": zoo.moved_into_updates(graphs)[:10],
        "differ": differ[:10],
    }), flush=True)
devices, graphs, _ = place(zoo.ZOO["staged"], 3, gradients=False)
print("RESULT", json.dumps(zoo.misplaced(graphs, devices)[1]))
"""


def run(counts, plain_folder):
    env = {
        "TESTS": SCRIPTS_PATH,
        "PLAIN": str(plain_folder),
        "COUNTS": json.dumps(counts),
        "TF_CONFIG": None,
    }
    return Workers(SCRIPT, 1, env=env, deadline=280).run()[0].results


def check(results, name, count):
    (found,) = [result for result in results[:-1] if result["name"] == name]
    assert found.pop("backward") > 0
    assert found == {
        "name": name,
        "count": count,
        "misplaced": [],
        "variables": [],
        "moved": [],
        "differ": [],
    }


# In the suite; the soak test has all, on the other number of devices.
SOME = ("functions", "staged")


@pytest.fixture(scope="module")
def results(plain_folder):
    return run({name: COUNTS[name] for name in SOME}, plain_folder)


@pytest.mark.parametrize("name", SOME)
def test_a_model_is_where_it_belongs_and_its_numbers_are_the_same(results, name):
    check(results, name, COUNTS[name])


@pytest.mark.soak
def test_so_are_all_kinds_on_the_other_number_of_devices(plain_folder):
    counts = {name: 5 - count for name, count in COUNTS.items()}
    found = run(counts, plain_folder)
    for name, count in counts.items():
        check(found, name, count)


def test_it_is_seen_if_the_backward_pass_stays_on_one_device(results):
    wrong = results[-1]
    assert wrong
    assert all("gradient_tape/" in operation for operation in wrong)


# Before, `iterations` was counted or not at the end of data, as it came.
UNKNOWN = """
x = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
data = tf.data.Dataset.from_generator(
    lambda: zip(x, x[:, :1]),
    output_signature=(tf.TensorSpec((4,)), tf.TensorSpec((1,)))).batch(8)
strategies = [
    tf.distribute.get_strategy(),
    kerasdist.ModelParallelStrategy({"last": "CPU:1", ".*": "CPU:0"}),
]
for strategy in strategies:
    found = []
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([
            keras.Input((4,)), keras.layers.Dense(8, name="first"),
            keras.layers.Dense(1, name="last")])
        model.compile(keras.optimizers.Adam(0.05), "mse")
    for _ in range(3):
        losses = model.fit(data, epochs=3, verbose=0).history["loss"]
        found.append([int(model.optimizer.iterations.numpy()), losses])
    result(found)
"""


@pytest.mark.soak
def test_steps_are_counted_as_by_keras_if_the_length_is_unknown():
    job = Workers(begin(2) + UNKNOWN, 1, env={"TF_CONFIG": None}, deadline=100)
    plain, placed = job.run()[0].results
    for (mine, losses), (theirs, expected) in zip(placed, plain, strict=True):
        assert mine == theirs
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
