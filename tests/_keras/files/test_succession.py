import csv
import json
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from scripts import ELASTIC, with_prelude
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from workers import Workers

SCRIPT = with_prelude(
    ELASTIC
    + """
from tensorflow.python.checkpoint import checkpoint

ENDS = json.loads(os.environ["ENDS"])  # by rank: the moment at which it ends
moment = ENDS.get(str(me))
sums = []  # at the ends of epochs

def total():
    return float(sum(np.abs(w).sum() for w in model.get_weights()))

class End(keras.callbacks.Callback):
    def __init__(self, name):
        super().__init__()
        self.name, self.epoch = name, 0

    def reached(self, *found):
        if moment == [self.name, *found]:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        self.reached("step", self.epoch, batch)

    def on_epoch_end(self, epoch, logs=None):
        if self.name == "last":
            sums.append(total())
        self.reached("epoch", epoch)

class Save(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.save(f"user_{epoch}.keras")

stop = keras.callbacks.EarlyStopping("loss", patience=2, min_delta=0.02)
lower = keras.callbacks.ReduceLROnPlateau(
    "loss", factor=0.5, patience=1, min_delta=0.05, min_lr=0.0)
best = keras.callbacks.ModelCheckpoint(
    "best_{epoch}.weights.h5", monitor="val_loss", save_weights_only=True,
    save_best_only=True)
history = model.fit(
    x, y, batch_size=16, epochs=8, validation_data=(x[:32], y[:32]),
    verbose=2, shuffle=False,
    callbacks=[
        stop, lower,
        keras.callbacks.CSVLogger("log.csv"),
        keras.callbacks.TensorBoard("board", update_freq=1),
        End("middle"), best,
        keras.callbacks.BackupAndRestore("backup", delete_checkpoint=False),
        Save(), End("last"),
    ])

model.save("end.keras")
if moment == ["checkpoint"]:
    checkpoint.TrackableSaver.save = lambda *args, **more: os.kill(
        os.getpid(), signal.SIGKILL)
kept = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), "kept", 2)
kept.save()
result({
    "rank": strategy.rank, "history": history.history, "sums": sums,
    "best": best.best, "waited": stop.wait, "end": total(),
    "kept": kept.latest_checkpoint,
    "steps": int(model.optimizer.iterations),
    "user": float(sum(
        np.abs(w).sum()
        for w in keras.models.load_model("user_0.keras").get_weights())),
})
strategy.close()
"""
)


# In the midst of an epoch's callbacks, of which some have written and some haven't; in
# the midst of an epoch; and in a file for which all wait.
ENDS = {0: ["middle", "epoch", 1], 1: ["middle", "step", 3, 2], 2: ["checkpoint"]}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folders = tmp_path_factory.mktemp("job"), tmp_path_factory.mktemp("alone")
    env, other = (
        {"FOLDER": str(folder), "ENDS": json.dumps(ends)}
        for folder, ends in zip(folders, (ENDS, {}), strict=True)
    )
    with (
        Workers(SCRIPT, len(ENDS) + 1, env=env, deadline=150) as job,
        Workers(SCRIPT, 1, env=other, deadline=150) as single,
    ):
        finished, (only,) = job.wait(), single.succeed()
    for each in finished:
        assert (each.returncode != 0) == (each.rank in ENDS), each.output
    return folders[0], finished, only.result


@pytest.fixture
def job(both: Any) -> tuple[Path, Any]:
    return both[0], both[1][-1]


def test_callbacks_decide_as_in_one_process(both: Any) -> None:
    _, finished, alone = both
    found = finished[-1].result
    assert found["rank"] == 0
    assert found["steps"] == alone["steps"]
    assert found["waited"] == alone["waited"]
    assert found["best"] == pytest.approx(alone["best"], rel=1e-4)
    assert set(found["history"]) == set(alone["history"])
    for name, values in alone["history"].items():
        assert found["history"][name] == pytest.approx(values, rel=1e-4, abs=1e-6)
    # A rate was lowered: otherwise nothing was decided.
    assert len(set(found["history"]["learning_rate"])) > 1


def test_the_log_has_each_epoch_once(job: Any) -> None:
    folder, last = job
    history = last.result["history"]
    with open(folder / "log.csv", newline="") as file:
        header, *rows = list(csv.reader(file))
    assert header == ["epoch", *sorted(history)]
    assert [int(row[0]) for row in rows] == list(range(len(history["loss"])))
    for row in rows:
        for name, value in zip(header[1:], row[1:], strict=True):
            assert float(value) == pytest.approx(history[name][int(row[0])])


def test_checkpoints_are_those_of_all_epochs(job: Any) -> None:
    folder, last = job
    epochs = len(last.result["sums"])
    for epoch in range(epochs):
        model = keras.models.load_model(folder / f"user_{epoch}.keras")
        total = sum(float(np.abs(w).sum()) for w in model.get_weights())
        assert total == pytest.approx(last.result["sums"][epoch], rel=1e-6)
    assert last.result["user"] == pytest.approx(last.result["sums"][0], rel=1e-6)
    losses = last.result["history"]["val_loss"]
    better = [e for e in range(epochs) if losses[e] == min(losses[: e + 1])]
    kept = sorted(folder.glob("best_*.weights.h5"))
    assert [path.name for path in kept] == [f"best_{e + 1}.weights.h5" for e in better]
    for path in kept:
        with h5py.File(path) as file:
            assert "layers" in file
    facts = json.loads((folder / "backup" / "training_metadata.json").read_text())
    assert facts["epoch"] == epochs
    end = keras.models.load_model(folder / "end.keras")
    right = end.get_weights()
    total = sum(float(np.abs(w).sum()) for w in right)
    assert total == pytest.approx(last.result["end"], rel=1e-6)
    # For which all waited: the chief was killed while it wrote.
    assert tf.train.latest_checkpoint(folder / "kept") == str(folder / "kept/ckpt-1")
    assert last.result["kept"] == "kept/ckpt-1"
    end.set_weights([np.zeros_like(weight) for weight in right])
    saved = tf.train.Checkpoint(model=end)
    saved.restore(str(folder / "kept/ckpt-1")).expect_partial()
    for weight, other in zip(end.get_weights(), right, strict=True):
        np.testing.assert_array_equal(weight, other)


def test_the_board_has_each_epoch(job: Any) -> None:
    folder, last = job
    history = last.result["history"]
    for run, tag, name in [
        ("train", "epoch_loss", "loss"),
        ("train", "epoch_accuracy", "accuracy"),
        ("validation", "epoch_loss", "val_loss"),
    ]:
        # One file of each chief of `fit`.
        files = list((folder / "board" / run).glob("*.tfevents.*"))
        assert len(files) == 3
        found = scalars(folder / "board" / run, tag)
        assert sorted(found) == list(range(len(history[name])))
        assert [found[epoch] for epoch in sorted(found)] == pytest.approx(
            history[name], rel=1e-5
        )
    # Single steps may be lost with the chief that hasn't written them yet.
    steps = scalars(folder / "board" / "train", "batch_loss")
    assert max(steps) == last.result["steps"]


def scalars(folder: Path, tag: str) -> dict[int, float]:
    reader = EventAccumulator(str(folder), {"tensors": 0})
    reader.Reload()
    return {
        event.step: float(make_ndarray(event.tensor_proto))
        for event in reader.Tensors(tag)
    }


def test_the_progress_bar_continues(both: Any) -> None:
    _, finished, _ = both
    epochs = len(finished[-1].result["sums"])
    # The epochs at whose ends it was the chief, each once.
    for rank, led in ((2, range(3, epochs)), (3, ())):
        lines = finished[rank].output.splitlines()
        shown = [line for line in lines if line.startswith("Epoch ")]
        assert shown == [f"Epoch {epoch + 1}/8" for epoch in led]
        assert len([line for line in lines if "6/6" in line]) == len(shown)
