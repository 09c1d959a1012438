"""`kerasdist advise`: a real script is measured, a strategy proposed."""

import json

import pytest

from kerasdist import cli

_SCRIPT = """
import keras
import numpy as np
import kerasdist

keras.utils.set_random_seed(1)
with kerasdist.RingStrategy().scope():
    model = keras.Sequential([keras.Input((4,), dtype="int32"),
                              keras.layers.Embedding(5000, 16), keras.layers.Flatten(),
                              keras.layers.Dense(40), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.random.randint(0, 5000, (640, 4))
model.fit(x, np.zeros((640, 1)), batch_size=16, epochs=2)
print("AFTER")
"""


def test_a_script_is_measured_and_a_strategy_proposed(launcher):
    file = launcher.folder / "steps.json"
    (launcher.folder / "train.py").write_text(_SCRIPT)
    launcher.verb = "advise"
    options = ["--workers", "4", "--network", "1G", "--steps", "10"]
    more = ["--devices", "2", "--profile", str(file), "--json", "train.py"]
    code, out, err = launcher.run(*options, *more, within=180.0)
    assert code == 0, err
    launcher.nothing_runs()
    found = json.loads(out)
    assert found["choices"][0]["verdict"] == "proposed"
    assert found["strategy"] == found["choices"][0]["strategy"]
    assert found["command"] == f"kerasdist run -n {found['workers']} train.py"
    assert found["batch_size"] == 16 * found["workers"]
    assert "AFTER" not in err
    # The rows of a table were counted by two workers.
    profiles = json.loads(file.read_text())
    assert list(profiles) == [""]
    profile = profiles[""]
    assert profile["tables"] == 5000 * 16 * 4
    assert sum(size for _, size, _ in profile["messages"]) < profile["tables"] / 4
    assert [stage[:2] for stage in profile["stages"][:2]] == [[1, 1], [2, 1]]
    code, out, _ = launcher.run(
        *("--workers", "4", "--network", "100M", "--lossy"),
        *("--profile", str(file), "--memory", "1KB"),
    )
    assert code == 1
    assert "nothing that was tried: the model needs" in out
    profile["stages"] = []
    file.write_text(json.dumps({"": profile}))
    code, _, err = launcher.run(
        *("--workers", "4", "--network", "1G"),
        *("--profile", str(file), "--memory", "1GB"),
    )
    assert code == 1
    assert "can't compute what the model needs" in err


@pytest.mark.soak
def test_messages_of_a_compressor_are_refused(launcher):
    launcher.verb = "advise"
    changed = _SCRIPT.replace("Strategy()", 'Strategy(compression="bf16")')
    (launcher.folder / "train.py").write_text(changed)
    options = ["--workers", "4", "--network", "1G", "--steps", "10", "train.py"]
    code, _, err = launcher.run(*options, within=180.0)
    assert code == 1
    assert "Received: compression=" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train.py"], "the machines aren't known. Give --workers and --network"),
        (["--workers", "4", "x"], "the machines aren't known"),
        (["--network", "1G", "x"], "the machines aren't known"),
        (["--speeds", "1,0", "x"], "must be a number above 0"),
        (["--memory", "much", "x"], "--memory"),
        (["-n", "2", "x"], "share its cores, so that none is measured as it will"),
        (["--workers", "2", "--network", "1G"], "expected a script"),
        (["--profile", "none.json"], "must be a file that `kerasdist advise` has wri"),
        (["--workers", "4", "x"], "Received: --workers 4, no --network, no hosts"),
    ],
)
def test_wrong_options_are_told_before_anything_runs(options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["advise", *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
