"""How many steps an optimizer has behind it, with those that others had taken.

Whole jobs that are interrupted are in tests/strategies/asynchronous/test_step_count.py.
"""

import json

import keras
import numpy as np
import pytest

from kerasdist import _keras
from kerasdist._keras.learning_rate import own_steps, resume, shared_steps, steps_of

ONES = np.ones((8, 1), "float32")


def build(optimizer):
    """A model without a strategy; the hooks are there all the same."""
    _keras.install()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


def schedule():
    return keras.optimizers.schedules.PolynomialDecay(1.0, 100, 0.0)


@pytest.mark.parametrize("scaled", [False, True])
def test_others_steps_count_until_another_backup_is_restored(scaled):
    inner = keras.optimizers.SGD(schedule(), gradient_accumulation_steps=2)
    optimizer = inner
    if scaled:
        inner = keras.optimizers.SGD(schedule())
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0)
    model = build(optimizer)
    for _ in range(3):
        model.train_on_batch(ONES, ONES)
    variables = [variable.path for variable in optimizer.variables]
    resume(model, False, None)
    resume(model, True, 3)
    assert shared_steps(inner) is None  # nobody else has taken any
    resume(model, True, 10)
    assert (int(own_steps(inner).numpy()), int(steps_of(inner))) == (3, 10)
    assert float(optimizer.learning_rate) == pytest.approx(0.9)
    # In the graph of a step, too, though that was traced before.
    function = model.train_function
    model.train_on_batch(ONES, ONES)
    assert int(steps_of(inner)) == 11
    assert [variable.path for variable in optimizer.variables] == variables
    # Another `fit` of the same process; then a backup of one that's further.
    resume(model, False, None)
    assert int(steps_of(inner)) == 11
    resume(model, True, 31)
    assert float(optimizer.learning_rate) == pytest.approx(0.69)
    assert model.train_function is function
    resume(model, True, None)
    assert float(optimizer.learning_rate) == pytest.approx(0.96)


def test_after_an_epoch_a_backup_has_no_steps_of_the_next(tmp_path):
    model = build(keras.optimizers.SGD(schedule()))
    kept = keras.callbacks.BackupAndRestore(str(tmp_path), delete_checkpoint=False)
    resume(model, True, 20)
    model.fit(ONES, ONES, batch_size=2, verbose=0, callbacks=[kept])
    facts = json.loads((tmp_path / "training_metadata.json").read_text())
    steps = {"steps": 24, "steps_of_epoch": 0}
    assert facts == {"epoch": 1, "batch": 0, "kerasdist": steps}
