import json
import sys
import textwrap

import keras
import pytest

import kerasdist
from kerasdist import cli
from kerasdist.strategies.devices import find_devices

MB = 10**6


def build():
    return keras.Sequential(
        [
            keras.Input((64,)),
            *(keras.layers.Dense(256, activation="relu") for _ in range(4)),
            keras.layers.Dense(10),
        ]
    )


def test_a_plan_for_devices_that_are_not_here():
    plan = kerasdist.plan(
        build, ["GPU:0", "GPU:1"], batch_size=32, optimizer="adam", memory_limits="16GB"
    )
    assert plan.fits
    assert list(plan.placement.values()) == ["GPU:0"] * 2 + ["GPU:1"] * 3
    assert [layer.kind for layer in plan.layers] == ["Dense"] * 5
    first = plan.layers[0]
    assert first.parameter_bytes == 4 * (64 * 256 + 256)
    assert first.slot_bytes == 2 * first.parameter_bytes
    assert "16 GB" in str(plan)
    assert first.path in str(plan)
    # The names are those that the model gets afterwards.
    assert list(plan.placement) == [layer.path for layer in build().layers]
    with pytest.raises(ValueError, match=r"Received: batch_size=0; expected integers"):
        kerasdist.plan(build, batch_size=0)


def test_when_nothing_fits_it_says_what_would():
    given = {"batch_size": 32, "optimizer": "adam", "memory_limits": 3 * MB}
    with pytest.raises(kerasdist.errors.PlanError) as caught:
        kerasdist.plan(build, ["GPU:0"], **given)
    assert any("more device" in line for line in caught.value.advice)
    assert not caught.value.plan.fits
    more = len(caught.value.plan.devices) + int(caught.value.advice[0].split()[0])
    names = [f"GPU:{i}" for i in range(more)]
    assert kerasdist.plan(build, names, **given).fits


def test_memory_of_this_machine_and_of_other_workers():
    (cpu,) = find_devices(["/device:CPU:0"])
    assert cpu.name == "CPU:0"
    assert cpu.memory_limit > 100 * MB
    assert "memory" in cpu.found
    name = "/job:worker/task:1/device:GPU:0"
    (device,) = find_devices(["/job:worker/task:1/GPU:0"], {name: "1GB"})
    assert (device.name, device.memory_limit) == (name, 10**9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"names": "GPU:0"}, r"^`devices` must be a list of device names,"),
        ({"names": []}, r"^`devices` must be a list of device names,"),
        ({"names": ["gpu"]}, r"^A device must be named as in TensorFlow\."),
        ({"names": ["CPU:0", "CPU:0"]}, r"^`devices` must be different ones\."),
        ({"names": ["GPU:7"]}, r"^There is no device GPU:7 here\."),
        (
            {"names": ["CPU:0"], "memory_limits": {"GPU:0": 1}},
            r"^`memory_limits` names devices that aren't planned for",
        ),
        ({"names": ["CPU:0"], "memory_limits": [1, 2]}, r"2 sizes for 1 devices\.$"),
        ({"names": ["CPU:0"], "memory_limits": 0}, r"^A memory limit must be"),
        ({"names": ["CPU:0"], "memory_limits": "0"}, r"^A size must be"),
    ],
)
def test_wrong_devices(given, message):
    with pytest.raises(ValueError, match=message):
        find_devices(**given)


# The command.


SCRIPT = """
    import keras

    def build_model():
        return keras.Sequential(
            [keras.Input((64,)), *(keras.layers.Dense(256) for _ in range(4))]
        )

    if __name__ == "__main__":
        raise SystemExit("it trains")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train_it.py"
    path.write_text(textwrap.dedent(SCRIPT))
    before = list(sys.path)
    yield path
    sys.path[:] = before
    sys.modules.pop("train_it", None)


def test_the_command_prints_the_tables(script, capsys):
    code = cli.main(
        [
            *("plan", f"{script}:build_model", "--devices", "GPU:0,GPU:1"),
            *("--memory", "16GB,8GB", "--batch-size", "32", "--optimizer", "adam"),
            *("--micro-batches", "4", "--rematerialize"),
        ]
    )
    assert code == 0
    text = capsys.readouterr().out
    assert text.startswith("Layers, for a batch of 32 rows in 4 micro-batches, act")
    assert "sequential" in text
    assert "8 GB" in text


def test_json_has_the_figures_of_the_tables(script, capfd):
    given = [
        *("plan", f"{script}:build_model", "--devices", "GPU:0,GPU:1", "--json"),
        *("--memory", "16GB", "--batch-size", "32", "--optimizer", "adam"),
    ]
    assert cli.main(given) == 0
    found = json.loads(capfd.readouterr().out)
    assert [found[key] for key in ("command", "ok", "error", "fits", "advice")] == [
        *("plan", True, None, True),
        [],
    ]
    first = found["layers"][0]
    assert first["class"] == "Dense"
    assert first["parameter_bytes"] == 4 * (64 * 256 + 256)
    assert first["slot_bytes"] == 2 * first["gradient_bytes"]
    assert [device["name"] for device in found["devices"]] == ["GPU:0", "GPU:1"]
    paths = [path for device in found["devices"] for path in device["layers"]]
    assert paths == [layer["path"] for layer in found["layers"]]
    assert found["devices"][0]["memory_bytes"] == 16 * 10**9
    assert sum(device["work"] for device in found["devices"]) == pytest.approx(1.0)


def test_what_would_fit_in_words_and_as_json(script, capfd):
    given = ["plan", f"{script}:build_model", "--devices", "GPU:0", "--memory", "1MB"]
    given += ["--batch-size", "8", "--optimizer", "adam"]
    assert cli.main(given) == 1
    assert "What would fit:\n  - " in capfd.readouterr().err
    assert cli.main([*given, "--json"]) == 1
    found = json.loads(capfd.readouterr().out)
    assert (found["ok"], found["fits"]) == (False, False)
    assert found["error"]["type"] == "PlanError"
    assert found["advice"][0] in found["error"]["message"]
    assert found["devices"][0]["peak_bytes"] > 10**6


def test_json_of_a_script_that_prints_and_fails(script, capfd):
    script.write_text(
        "import os\nprint('noise')\nos.write(1, b'more noise')\n"
        "def build(): raise RuntimeError('no data here')"
    )
    with pytest.raises(RuntimeError, match=r"^no data here$"):
        cli.main(["plan", f"{script}:build", "--batch-size", "8", "--json"])
    out, err = capfd.readouterr()
    assert json.loads(out)["error"] == {
        "type": "RuntimeError",
        "message": "no data here",
    }
    assert "noise" in err
    assert "more noise" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train.py", "expected a script and a function"),
        ("missing.py:build", "there is no script 'missing.py'"),
        ("missing_module:build", "there is no module 'missing_module'"),
        ("json:nothing", "json has no function 'nothing'"),
        ("a.py:b --batch-size 0", "must be an integer above 0"),
        ("a.py:b --memory much", "A size must be a number of bytes"),
    ],
)
def test_wrong_arguments_of_the_command(arguments, message, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(["plan", "--batch-size", "8", *arguments.split()])
    assert message in capsys.readouterr().err
