"""Where schedules and warm-ups of asynchronous workers go on after an interruption.

One process that goes on with a backup is in _keras/optimizer/test_global_step.py.
"""

import json

import keras
import pytest
from scripts import with_prelude

from kerasdist.strategies.asynchronous.tables import StepCount
from workers import Workers

SCRIPT = with_prelude("""
import shutil
from kerasdist._keras.learning_rate import steps_of
from kerasdist.callbacks import BroadcastInitialState

# With a bound, or the chief may get hardly any batch on a busy machine.
strategy = kerasdist.ParameterServerStrategy("async", max_staleness=4, timeout=40)
rank, folder = strategy.rank, sys.argv[1]
x = np.ones((96, 1), "float32")

class Slope(keras.losses.Loss):
    "With a gradient of 1: the weight is the number of steps that are in it."
    def call(self, y_true, y_pred):
        return -y_pred[:, 0]

class Steps(keras.callbacks.Callback):
    "Notes how many steps are behind each; the chief keeps a backup of epoch 1."
    found = []
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch, self.own = epoch, 0
    def on_train_batch_begin(self, batch, logs=None):
        self.found.append(int(steps_of(self.model.optimizer)))
        # The chief needs its steps.
        wait = rank and self.epoch and self.own == 3
        while wait and not os.path.exists(folder + "/again0"):
            time.sleep(0.01)
    def on_train_batch_end(self, batch, logs=None):
        self.own += 1
        if rank == 0 and self.epoch == 1 and self.own == 3 and sys.argv[2] == "first":
            shutil.copytree(folder + "/first0", folder + "/again0")

with strategy.scope():
    m = keras.Sequential([
        keras.Input((1,)),
        keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    m.compile(keras.optimizers.SGD(1.0), Slope())
kept = keras.callbacks.BackupAndRestore(
    f"{folder}/{sys.argv[2]}{rank}", save_freq=1, delete_checkpoint=False)
# Only the chief has the file.
m.fit(x, x, batch_size=4, epochs=3, verbose=0,
      callbacks=[BroadcastInitialState(verbose=0), kept, Steps()])
result([Steps.found, int(steps_of(m.optimizer)), float(m.get_weights()[0][0, 0])])
""")


@pytest.mark.soak
def test_steps_go_on_with_those_that_are_in_the_weights(tmp_path):
    """Of a backup that the chief has written in the midst of an epoch."""
    behind = 0
    for name, epochs in (("first", 3), ("again", 2)):
        args = [str(tmp_path), name]
        results = Workers(SCRIPT, 2, args, servers=1, deadline=90).results()
        total = behind + 24 * epochs
        for found, last, weight in results:
            assert found == sorted(set(found))
            assert behind <= found[0] <= found[-1] < total
            assert (last, weight) == (total, total)
        assert min(found[0] for found, *_ in results) == behind
        if name == "first":
            metadata = tmp_path / "again0" / "training_metadata.json"
            facts = json.loads(metadata.read_text())["kerasdist"]
            behind = facts["steps"]
            assert behind == 24 + facts["steps_of_epoch"]
            assert facts["steps_of_epoch"] >= 3


def test_it_counts_from_where_an_optimizer_was():
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=3)
    count = StepCount("/device:CPU:0")
    assert (count.of(optimizer), count.progress()) == (None, None)
    # Two windows, and one of the third.
    optimizer.build([keras.Variable([0.0])])
    optimizer._iterations.assign(7)
    count.begin(optimizer, 0, None)
    count.begin_epoch()
    assert count.progress() == (7, 0)
    count.note(4)
    assert count.progress() == (19, 12)
    # What was pushed between two epochs is an update, but no step.
    count.exclude_update()
    count.begin_epoch()
    assert count.progress() == (16, 0)
    # Another `fit` goes on, one that is resumed as it is told.
    count.begin(optimizer, 4, None)
    assert count.progress() == (16, 0)
    count.begin(optimizer, 4, 31)
    assert count.progress() == (31, 15)
    other = StepCount("/device:CPU:0")
    other.join(optimizer, count.offset_of(optimizer))
    other.note(5)
    assert int(other.of(optimizer)) == 34
    # Of no weights there's no count.
    count.begin(None, 0, None)
    assert count.progress() is None
