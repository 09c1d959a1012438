"""What BackupAndRestore keeps: how far training had come."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest

import kerasdist
from kerasdist._keras.file_writers import Backup, read_backup

Kept = keras.callbacks.BackupAndRestore


@pytest.mark.parametrize(
    ("freq", "text", "expected"),
    [
        # One process, or workers in step: after an epoch, in one, after one batch.
        ("epoch", '{"epoch": 2, "batch": 0}', Backup(restored=True)),
        (4, '{"epoch": 1, "batch": 3}', Backup(restored=True, batches=4)),
        (1, '{"epoch": 1, "batch": 0}', Backup(restored=True, batches=1)),
        # Asynchronous workers: the chief's batch isn't how many there were.
        (
            1,
            '{"epoch": 1, "batch": 0, "kerasdist": {"steps": 9, "steps_of_epoch": 3}}',
            Backup(restored=True, steps=9, batches=3),
        ),
        (
            "epoch",
            '{"epoch": 1, "batch": 0, "kerasdist": {"steps": 6, "steps_of_epoch": 6}}',
            Backup(restored=True, steps=6),
        ),
        # Not there, not whole, or another's.
        (1, None, Backup()),
        (1, '{"epoch": 1, "ba', Backup()),
        (1, "[]", Backup()),
    ],
)
def test_it_is_read(tmp_path, freq, text, expected):
    kept = Kept(str(tmp_path), save_freq=freq)
    if text is not None:
        (tmp_path / "training_metadata.json").write_text(text, encoding="utf-8")
    assert read_backup([keras.callbacks.History(), kept]) == expected
    assert read_backup([keras.callbacks.History()]) == Backup()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_one_worker_has_counted_all_steps_itself(tmp_path, mode):
    """What several write is in tests/strategies/asynchronous/test_step_count.py."""
    strategy = kerasdist.ParameterServerStrategy(mode)
    kept = Kept(str(tmp_path), save_freq=4, delete_checkpoint=False)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    ones = np.ones((8, 1), "float32")
    model.fit(ones, ones, batch_size=2, epochs=1, verbose=0, callbacks=[kept])
    strategy.close()
    facts = json.loads((tmp_path / "training_metadata.json").read_text())
    assert facts == {"epoch": 0, "batch": 3}
    assert int(model.optimizer.iterations) == 4
