"""An elastic job of one worker: SIGTERM, and the next start, with all kinds of data."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elastic_jobs import BEGIN

from workers import Finished, Workers

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]

SCRIPT = (
    BEGIN
    + """
kind, when = sys.argv[1], os.environ.get("WHEN")
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * 2
)
several, steps = kind.startswith("several"), 4 if "executions" in kind else 1
strategy = kerasdist.RingStrategy(
    ["CPU:0", "CPU:1"] if several else ["CPU:0"],
    elastic=True,
    shard="off" if kind == "own" else "rows",
)
model = classifier(strategy, steps_per_execution=steps)


class Items(keras.utils.PyDataset):
    def __len__(self):
        return 8

    def __getitem__(self, number):
        rows = slice(32 * number, 32 * number + 32)
        return x[rows], y[rows]


def generated():
    while True:
        for number in range(8):
            yield x[32 * number : 32 * number + 32], y[32 * number : 32 * number + 32]


def pairs():
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    options = tf.data.Options()
    options.autotune.enabled = False
    # Whose last batch has fewer rows than there are replicas.
    return rows.shuffle(250, seed=3).take(225).batch(32).with_options(options)


class Ask(keras.callbacks.Callback):
    seen = 0
    begun = 0

    def ask(self, moment):
        if moment == when:
            os.kill(os.getpid(), signal.SIGTERM)
            while not signal.getsignal(signal.SIGTERM).requested:
                time.sleep(0.001)

    def on_train_batch_begin(self, batch, logs=None):
        self.begun += 1
        self.ask(f"step {self.begun}")

    def on_test_begin(self, logs=None):
        self.seen += 1
        self.ask(f"check {self.seen}")


data = {
    "dataset": lambda: dict(x=pairs()),
    "distributed": lambda: dict(x=strategy.experimental_distribute_dataset(pairs())),
    "own": lambda: dict(x=pairs()),
    "several dataset": lambda: dict(x=pairs()),
    "several": lambda: dict(x=x, y=y, batch_size=32),
    "executions": lambda: dict(x=pairs().repeat(), steps_per_epoch=8),
    "several executions": lambda: dict(x=pairs().repeat(), steps_per_epoch=8),
    "array executions": lambda: dict(x=x, y=y, batch_size=32),
    "items": lambda: dict(x=Items(workers=2), shuffle=True),
    "unknown": lambda: dict(x=pairs().filter(lambda a, b: tf.constant(True))),
    "generator": lambda: dict(x=generated(), steps_per_epoch=5),
}[kind]()
ask = Ask()
stopping = keras.callbacks.EarlyStopping(
    "loss", patience=50, restore_best_weights=True
)
earlier = model.fit(x, y, batch_size=50, epochs=1, verbose=0).history["loss"]
ask.ask("between")
model.evaluate(x[:50], y[:50], verbose=0)
history = model.fit(
    **data, epochs=4, verbose=0, callbacks=[ask, stopping],
    validation_data=(x[:50], y[:50]), validation_batch_size=10,
)
after = model.evaluate(x[:50], y[:50], verbose=0)
text = json.dumps([
    history.epoch, history.history, whole(model), after, [ask.begun, ask.seen],
    earlier,
])
os.write(1, f"RESULT {text}\\n".encode())
"""
)


def run(folder: Path, kind: str, when: str | None = None, **env: str) -> Finished:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    env = {"KERASDIST_CHECKPOINT_DIR": str(folder / "checkpoints"), **env}
    if when is not None:
        env["WHEN"] = when
    none: dict[str, Any] = {"TF_CONFIG": None}
    with Workers(script, 1, [kind], {**env, **none}, 120.0, cold=True) as job:
        return job.wait()[0]


def parts(finished: Finished) -> list[Any]:
    epochs, history, *others = finished.result
    return [epochs, *history.values(), *others]


@pytest.mark.parametrize(
    "kind",
    [
        "dataset",
        "distributed",
        "own",
        "several",
        "several dataset",
        "executions",
        "several executions",
        "unknown",
        "array executions",
        "items",
        "generator",
    ],
)
def test_the_next_start_continues(kind: str, tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    expected = run(tmp_path / "undisturbed", kind)
    assert expected.returncode == 0, expected.output
    # Before the first step; in an epoch; in the validation of one; in the last one.
    for when in ("between", "step 4", "check 2", "check 4"):
        found = run(tmp_path, kind, when)
        assert found.returncode == -signal.SIGTERM, found.output
        assert "The next start of this script continues there" in found.output
    found = run(tmp_path, kind)
    assert found.returncode == 0, found.output
    assert "`fit` continues after step" in found.output
    if kind.startswith("several"):
        # The replicas' parts of metrics are added up in another order.
        for one, other in zip(parts(found), parts(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    else:
        assert json.dumps(found.result) == json.dumps(expected.result)
    assert not list((tmp_path / "checkpoints").iterdir())
