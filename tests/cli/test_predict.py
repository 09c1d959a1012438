"""`kerasdist predict`: a step of a real script is measured, then simulated."""

import json

import pytest

import kerasdist
from kerasdist import cli

_SCRIPT = """
import keras
import numpy as np
import kerasdist

keras.utils.set_random_seed(1)
with kerasdist.RingStrategy(bucket_size=40_000).scope():
    model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(100),
                              keras.layers.Dense(100), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.random.rand(640, 100).astype("float32")
print("in the script")
model.fit(x, x[:, :1], batch_size=16, epochs=2)
print("AFTER")
"""


def _predicted(launcher, *options, script="train.py"):
    (launcher.folder / "train.py").write_text(_SCRIPT)
    launcher.verb = "predict"
    code, out, err = launcher.run(*options, *([script] if script else []), within=180.0)
    assert code == 0, err
    launcher.nothing_runs()
    return out, err


@pytest.mark.soak
def test_a_script_is_measured_and_its_profile_is_used_again(launcher):
    file, plot = launcher.folder / "step.json", launcher.folder / "step.svg"
    options = ("--network", "1G", "--workers", "2,8", "--steps", "20")
    more = ("--profile", str(file), "--json", "--price", "3")
    out, err = _predicted(launcher, *options, *more)
    found = json.loads(out)
    assert found["ok"]
    assert set(found["workers"]) == {"2", "8"}
    assert {"step_s", "low", "high", "efficiency", "limit"} < set(found["workers"]["8"])
    assert "in the script" in err
    assert "AFTER" not in err
    profile = json.loads(file.read_text())[""]
    assert profile == found["profile"]
    assert len(profile["compute"]) == 20
    assert profile["rows"] == 16
    assert profile["steps"] == 40
    # Two workers that really send have the same messages.
    alone = [m[:2] for m in profile["messages"]]
    assert alone == [["all_reduce", size] for size in (804, 40_000, 400, 40_000)]
    other = launcher.folder / "two.json"
    simulated = kerasdist.predict(
        launcher.folder / "train.py",
        workers=[2, 8],
        network="1G",
        options=["-n", "2", "--profile", str(other)],
    )
    assert list(simulated) == [2, 8]
    assert simulated[8].step_s > simulated[2].step_s > 0
    two = [m[:2] for m in json.loads(other.read_text())[""]["messages"]]
    assert two[: len(alone)] == alone
    (launcher.folder / "wrong.py").write_text("raise KeyError('mine')")
    with pytest.raises(RuntimeError, match=r"wrong.py.*exit code 1"):
        kerasdist.predict(launcher.folder / "wrong.py", workers=[2], network="1G")
    # A table and a picture of what was measured before.
    out, _ = _predicted(
        launcher, *(*options, "--profile", str(file), "--plot", str(plot)), script=None
    )
    assert out.startswith("kerasdist: simulated steps of this job\n")
    assert "16 rows per step" in out
    assert plot.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("train.py", "--network is missing"),
        ("--network fast x", "A network must be 'loopback' or its bits"),
        ("--network 1G", "expected a script"),
        ("--network 1G --profile none.json", "must be a file that `kerasd"),
        ("--network 1G --workers 2,0 x", "must be an integer above 0"),
        ("--network 1G --plot no/a.svg x", "in a folder that exists"),
        ("--network 1G --local-steps 2 --strategy sync x", "--local-steps has no eff"),
        ("--network 1G --servers 2 x", "Expected --strategy sync"),
        ("--network 1G --compression bf16 -n 2 x", "bf16 with several workers"),
    ],
)
def test_wrong_options_are_told_before_anything_runs(options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["predict", *options.split()])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
