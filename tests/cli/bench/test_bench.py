import os
import sys
from types import SimpleNamespace

import pytest

from kerasdist import cli
from kerasdist.cli import first_fit as worker

_SCRIPT = """
import sys
import keras
import numpy as np
import kerasdist
from kerasdist.callbacks import ScalingTensorBoard
from beside import ROWS

keras.utils.set_random_seed(1)
strategy = {
    "ring": kerasdist.RingStrategy,
    "async": lambda: kerasdist.ParameterServerStrategy(mode="async"),
}[sys.argv[1]]()
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.random.rand(ROWS, 8).astype("float32")
print(__name__, sys.argv[1:], flush=True)
model.fit(x, x[:, :1], batch_size=16, epochs=int(sys.argv[2]),
          callbacks=[ScalingTensorBoard("never")])
print("AFTER", flush=True)
"""
_PARTS = ("input", "compute", "update", "outside")


def _bench(launcher, *arguments):
    folder = launcher.folder / "folder"
    folder.mkdir()
    (folder / "train.py").write_text(_SCRIPT)
    (folder / "beside.py").write_text("ROWS = 640")
    launcher.verb = "bench"
    code, out, err = launcher.run(*arguments, within=180.0)
    launcher.nothing_runs()
    assert not (launcher.folder / "never").exists()
    return code, out, err


def _check_report(out, err, workers):
    assert "AFTER" not in out + err
    assert out.startswith("kerasdist: how this job scales\n")
    assert "loss" not in out
    assert " - loss: " in err
    assert f"\n  workers             {workers}\n" in out
    assert "\n  a step:\n" in out
    for part in _PARTS:
        assert f"\n    {part} " in out
    assert "Traceback" not in err
    assert "how this job scales" not in err


def test_steps_end_in_the_midst_of_fit(launcher):
    script = ("folder/train.py", "ring", 1000)
    code, out, err = _bench(launcher, "-n", 2, "--steps", 60, *script)
    assert code == 0, err
    assert "__main__ ['ring', '1000']\n" in err
    _check_report(out, err, 2)
    assert "\n  global batch        16\n" in out
    assert "\n  scaling efficiency " in out


def test_no_fit_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text("")
    monkeypatch.setattr(sys, "argv", ["w", "bench", "60", str(tmp_path / "script.py")])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit, match=r"^kerasdist bench found nothing to measure"):
        worker.main()


def test_a_result_that_nobody_reads_is_no_error(tmp_path, monkeypatch):
    """As in `kerasdist bench train.py | head`."""
    measured = SimpleNamespace(figures=1, verdict=1)
    monkeypatch.setattr(worker, "ScalingTensorBoard", lambda *_, **more: measured)
    monkeypatch.setattr(worker.bottleneck, "to_text", lambda *_: "the report")
    (tmp_path / "script.py").touch()
    monkeypatch.setattr(sys, "argv", ["w", "bench", "60", str(tmp_path / "script.py")])
    monkeypatch.setattr(sys, "path", [*sys.path])
    reading, writing = os.pipe()
    os.close(reading)
    kept = os.dup(1)
    os.dup2(writing, 1)
    os.close(writing)
    try:
        with open(1, "w", encoding="utf-8", closefd=False) as pipe:
            monkeypatch.setattr(sys, "stdout", pipe)
            with pytest.raises(SystemExit, match=r"^kerasdist bench found nothing"):
                worker.main()
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def test_wrong_options(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "--steps", "5", "nowhere.py"])
    assert caught.value.code == 2
    words = capsys.readouterr().err
    assert words.startswith("usage: kerasdist bench [-n N | -H HOSTS] [--steps S]")
    assert "--steps must be an integer >= 20, because the first steps are slow" in words
    assert "Received: --steps 5\n  there is no script 'nowhere.py' (in " in words
