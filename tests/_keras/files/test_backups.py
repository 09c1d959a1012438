import keras
import pytest

from kerasdist._keras.file_writers import Backup, read_backup

Kept = keras.callbacks.BackupAndRestore
_OURS = '{"epoch": 1, "batch": 0, "kerasdist": {"steps": %d, "steps_of_epoch": %d}}'


@pytest.mark.parametrize(
    ("freq", "text", "expected"),
    [
        # One process, or workers in step: after an epoch, in one, after one batch.
        ("epoch", '{"epoch": 2, "batch": 0}', Backup(restored=True)),
        (4, '{"epoch": 1, "batch": 3}', Backup(restored=True, batches=4)),
        (1, '{"epoch": 1, "batch": 0}', Backup(restored=True, batches=1)),
        # Asynchronous workers: the chief's batch isn't how many there were.
        (1, _OURS % (9, 3), Backup(restored=True, steps=9, batches=3)),
        ("epoch", _OURS % (6, 6), Backup(restored=True, steps=6)),
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
