import json
import runpy
import sys
from pathlib import Path

import pytest

from places import ROOT
from workers import output_of

FOLDER = ROOT / "benchmarks"


def run(name: str, output: Path, *arguments: str) -> dict:
    command = (sys.executable, FOLDER / name / "run.py", "--quick")
    output_of(*command, "--output", output, *arguments)
    text = (output / "output.txt").read_text(encoding="utf-8")
    assert "load before" in text
    assert "| --" in text
    return json.loads((output / "results.json").read_text(encoding="utf-8"))


STARTS = """
import os, runpy, sys
import kerasdist, numpy

for path in sys.argv[1:]:
    if os.fork() == 0:
        sys.argv = [path, "--help"]
        sys.path[0] = os.path.dirname(path)
        runpy.run_path(path, run_name="__main__")
    assert os.wait()[1] == 0, path
"""


@pytest.mark.soak
def test_each_script_starts():
    """Also those that run in the soak tests only."""
    scripts = sorted(FOLDER.glob("*/run.py"))
    shown = output_of(sys.executable, "-c", STARTS, *scripts)
    assert shown.count("usage: ") == shown.count("\n  --quick") == len(scripts)


def test_samples_are_kept_compactly(monkeypatch):
    """A list of numbers takes a line; so small a file can be read, and compared."""
    monkeypatch.syspath_prepend(FOLDER)
    from common.report import compact

    for path in FOLDER.glob("*/results.json"):
        text = path.read_text("utf-8")
        assert text == compact(json.loads(text)) + "\n", path


def test_gpu_check_without_a_gpu(tmp_path):
    command = (sys.executable, FOLDER / "gpu_check" / "run.py", "--output", tmp_path)
    with pytest.raises(AssertionError, match="There is no GPU here"):
        output_of(*command)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_gpu_check_on_parts_of_the_cpu(tmp_path):
    """Five jobs, which also MirroredStrategy and TensorFlow's collectives run."""
    command = (sys.executable, FOLDER / "gpu_check" / "run.py", "--devices", "cpu")
    output_of(*command, "--quick", "--output", tmp_path, within=880)
    results = json.loads((tmp_path / "results.json").read_text("utf-8"))["results"]
    assert len(results) == 6
    losses = {name: found["mlp"]["loss"] for name, found in results.items()}
    alone = losses["plain Keras, 1"]
    assert losses["RingStrategy, 1 worker, 1"] == pytest.approx(alone, rel=1e-3)
    two = [loss for name, loss in losses.items() if name.endswith(" 2")]
    assert two == pytest.approx([two[0]] * 4, rel=1e-3)


def test_the_chart_shows_the_output():
    code = runpy.run_path(str(FOLDER / "fit" / "chart.py"))
    measured = FOLDER.joinpath("fit", "output.txt").read_text("utf-8")
    shown = code["CHART"].read_text("utf-8")
    assert shown == code["svg"](code["shares"](measured))


# Of each benchmark its arguments, and what must hold of its results.
BENCHMARKS = {
    **{
        name: []
        for name in (
            *("wire", "heartbeats", "membership", "memory_startup", "compression"),
            *("local_steps", "balance", "overlap", "server_throughput", "pipeline"),
            *("placement_memory", "planning_time", "chief_data", "epoch_check"),
            *("local_replicas", "board_cost", "tuning", "prediction", "advice"),
            *("warm_up", "row_updates", "versions"),
        )
    },
    "all_reduce": ["--columns", "memcpy", "shared_memory", "tcp"],
    "growth": ["--only", "workers", "--no-strategy"],
    "fit": ["--models", "cnn", "--columns", "plain", "two workers"],
    "server_steps": ["--models", "digits", "--columns", "RingStrategy", "async"],
    "straggler": ["--columns", "sync", "free"],
    "staleness": ["--strategies", "s=0"],
    "placed_overhead": ["--models", "cnn", "--columns", "placed"],
    "embedding_rows": ["--columns", "rows", "whole"],
}
HOLDS = {
    # Ranks that move on get nothing but the header and the tag.
    "heartbeats": lambda r: (
        (used := r["samples"]["training"]["100"])["bytes"] == 56 * used["frames"]
    ),
    "memory_startup": lambda r: r["medians"]["run"]["gradient_bytes"] == 4 * 3_962_890,
    "compression": lambda r: 0 < r["mlp"]["sent"]["factors"] < 16e6,
    "staleness": lambda r: r["results"]["s=0"]["2"][0]["accuracy"][-1] > 0.5,
    "row_updates": lambda r: r["Adagrad 1000000 16 5120"]["equal"],
    "pipeline": lambda r: len({round(loss, 4) for loss in r["loss"].values()}) == 1,
}
ON_HOSTS = ("wire", "overlap", "compression", "local_steps", "tuning", "prediction")
ON_HOSTS += ("advice",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.netns] * (name in ON_HOSTS)
            + [pytest.mark.soak] * (name != "wire"),
        )
        for name in BENCHMARKS
    ],
)
def test_a_benchmark_measures(name, tmp_path):
    results = run(name, tmp_path, *BENCHMARKS[name])
    assert HOLDS.get(name, bool)(results), results
