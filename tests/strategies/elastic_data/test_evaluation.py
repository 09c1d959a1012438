"""Evaluations of an elastic job are those of one process, also of unusual losses."""

from __future__ import annotations

import pytest
from scripts import PRELUDE
from soak import soak

from workers import Workers

SCRIPT = (
    PRELUDE
    + """
strategy = kerasdist.RingStrategy(elastic="TF_CONFIG" in os.environ)
keras.utils.set_random_seed(1)


class Loss(keras.layers.Layer):
    # One number per row: Keras takes their mean.
    def call(self, target, output):
        difference = keras.ops.square(target - output)
        self.add_loss(keras.ops.mean(difference, axis=-1, keepdims=True))
        return output


with strategy.scope():
    inputs, target = keras.Input((4,)), keras.Input((1,))
    output = Loss()(target, keras.layers.Dense(1)(inputs))
    model = keras.Model([inputs, target], output)
    model.compile("sgd")

random = np.random.default_rng(0)
x = random.normal(size=(40, 4)).astype("float32")
y = x.sum(1, keepdims=True)


class Items(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, i):
        return ((x[8 * i : 8 * i + 8], y[8 * i : 8 * i + 8]),)


def batches(rows):
    return tf.data.Dataset.from_tensor_slices(((x[:rows], y[:rows]),)).batch(8)


held = Items() if sys.argv[1] == "items" else batches(20)
history = model.fit(batches(40), verbose=0, validation_data=held).history
found = [history["loss"][0], history["val_loss"][0]]
found.append(model.evaluate(held, verbose=0, return_dict=True)["loss"])
result([float(each) for each in found])
"""
)


@pytest.mark.parametrize("data", [soak("items"), "dataset"])
def test_a_loss_of_each_row_from_add_loss(data: str) -> None:
    with Workers(SCRIPT, 1, [data], env={"TF_CONFIG": None}) as job:
        expected = job.succeed()[0].result
    with Workers(SCRIPT, 2, [data]) as job:
        for each in job.succeed():
            assert each.result == pytest.approx(expected, rel=1e-5)
            assert "isn't known to be made of" not in each.output
