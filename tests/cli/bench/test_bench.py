import os
import sys
from types import SimpleNamespace

import pytest

from kerasdist import cli
from kerasdist.cli import first_fit as worker
from workers import Workers

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


@pytest.fixture
def script(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "beside.py").write_text("ROWS = 640")
    (folder / "train.py").write_text(_SCRIPT)
    return folder / "train.py"


def _check_report(report, said):
    assert "__main__ ['ring', '1000']\n" in said
    assert " - loss: " in said
    for text in ("AFTER", "Traceback", "how this job scales"):
        assert text not in said
    assert report.startswith("kerasdist: how this job scales\n")
    for text in ("AFTER", "loss"):
        assert text not in report
    assert "\n  workers             2\n" in report
    assert "\n  global batch        16\n" in report
    assert "\n  scaling efficiency " in report
    assert "\n  a step:\n" in report
    for part in _PARTS:
        assert f"\n    {part} " in report


@pytest.mark.soak
def test_the_command(launcher, script):
    launcher.verb = "bench"
    options = ("-n", 2, "--steps", 60, script, "ring", 1000)
    code, out, err = launcher.run(*options, within=180.0)
    assert code == 0, err
    launcher.nothing_runs()
    assert not (launcher.folder / "never").exists()
    _check_report(out, err)


def test_steps_end_in_the_midst_of_fit(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main = "import keras\nfrom kerasdist.cli.first_fit import main\nmain()"
    args = ["bench", "60", str(script), "ring", "1000"]
    chief, other = Workers(main, 2, args).run()
    said, begin, report = chief.output.partition("kerasdist: how this job scales\n")
    _check_report(begin + report, said)
    assert "AFTER" not in other.output
    assert not (tmp_path / "never").exists()


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
