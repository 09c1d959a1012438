"""The benchmarks' scripts still work, with the smallest sizes and without peers."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from places import ROOT
from workers import python_env

FOLDER = ROOT / "benchmarks"
RESULTS = sorted(FOLDER.glob("*/results.json"))


def run(name: str, output: Path, *arguments: str) -> dict:
    """Runs a benchmark; returns its results."""
    command = [sys.executable, str(FOLDER / name / "run.py"), "--quick"]
    done = subprocess.run(
        [*command, "--output", str(output), *arguments],
        env=python_env(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = (output / "output.txt").read_text(encoding="utf-8")
    assert "load before" in text
    assert "| --" in text
    return json.loads((output / "results.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "name", [path.parent.name for path in sorted(FOLDER.glob("*/run.py"))]
)
def test_each_script_starts(name):
    """Also those that run in the soak tests only."""
    for path in FOLDER.joinpath(name).glob("*.py"):
        compile(path.read_text("utf-8"), path, "exec")
    done = subprocess.run(
        [sys.executable, str(FOLDER / name / "run.py"), "--help"],
        env=python_env(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout


@pytest.mark.parametrize("path", RESULTS, ids=[p.parent.name for p in RESULTS])
def test_samples_are_kept_compactly(path, monkeypatch):
    """A list of numbers takes a line; so small a file can be read, and compared."""
    monkeypatch.syspath_prepend(FOLDER)
    from common.report import compact

    text = path.read_text("utf-8")
    assert text == compact(json.loads(text)) + "\n"


def test_gpu_check_without_a_gpu(tmp_path):
    done = subprocess.run(
        [sys.executable, FOLDER / "gpu_check" / "run.py", "--output", tmp_path],
        env=python_env(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("There is no GPU here. Received: --devices gpu. Exp")


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_gpu_check_on_parts_of_the_cpu(tmp_path):
    """Five jobs, which also MirroredStrategy and TensorFlow's collectives run."""
    done = subprocess.run(
        [
            *(sys.executable, FOLDER / "gpu_check" / "run.py", "--devices", "cpu"),
            *("--quick", "--output", tmp_path),
        ],
        env=python_env(),
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text("utf-8"))["results"]
    assert len(results) == 6
    losses = {name: found["mlp"]["loss"] for name, found in results.items()}
    alone = losses["plain Keras, 1"]
    assert losses["RingStrategy, 1 worker, 1"] == pytest.approx(alone, rel=1e-3)
    two = [loss for name, loss in losses.items() if name.endswith(" 2")]
    assert two == pytest.approx([two[0]] * 4, rel=1e-3)


def test_all_reduce(tmp_path):
    columns = ["memcpy", "shared_memory", "tcp"]
    results = run("all_reduce", tmp_path, "--columns", *columns)
    assert list(results["medians"]) == columns
    assert all(len(found) == 2 for found in results["medians"].values())


@pytest.mark.netns
def test_wire(tmp_path):
    (row,) = run("wire", tmp_path)["rows"]
    assert len(row) == 3


def test_the_chart_shows_the_output():
    """README's picture is made from what the benchmark has measured."""
    code = runpy.run_path(str(FOLDER / "fit" / "chart.py"))
    measured = FOLDER.joinpath("fit", "output.txt").read_text("utf-8")
    shown = code["CHART"].read_text("utf-8")
    assert shown == code["svg"](code["shares"](measured))


def test_growth(tmp_path):
    results = run("growth", tmp_path, "--only", "workers", "--no-strategy")
    assert [len(found) for found in results["workers"].values()] == [2, 2]


@pytest.mark.soak
def test_heartbeats(tmp_path):
    used = run("heartbeats", tmp_path)["samples"]["training"]["100"]
    # Ranks that move on get nothing but the header and the tag.
    assert used["bytes"] == 56 * used["frames"]
    assert 0 < used["user"] + used["system"] < used["seconds"]


def test_membership(tmp_path):
    changes = run("membership", tmp_path)["changes"]
    assert len(changes) == 3
    for found in changes.values():
        ((proposer, other),) = found["10"]
        assert 0 < other["sent"] < proposer["sent"]
        # Requests, proposals, the decision; a newcomer also has its first steps.
        assert 8 * 3 <= proposer["messages"] <= 8 * 3 + 5


@pytest.mark.soak
def test_memory_startup(tmp_path):
    medians = run("memory_startup", tmp_path)["medians"]
    assert medians["run"]["gradient_bytes"] == 4 * 3_962_890


@pytest.mark.soak
def test_fit(tmp_path):
    names = ["plain", "two workers"]
    results = run("fit", tmp_path, "--models", "cnn", "--columns", *names)
    assert list(results["cnn"]) == names
    assert [len(turn) for turn in results["cnn"]["two workers"]] == [2, 2]


@pytest.mark.soak
@pytest.mark.netns
def test_overlap(tmp_path):
    results = run("overlap", tmp_path)
    assert len(results["rows"]) == 2
    kinds = {kind for kind, _, _ in results["trace"]}
    assert kinds == {"forward pass", "backward pass", "all-reduce"}


@pytest.mark.soak
def test_server_throughput(tmp_path):
    rates = run("server_throughput", tmp_path)["bytes_per_second"]
    columns = ("memcpy", "shared_memory", "tcp")
    assert list(rates) == [f"{name}, {n}" for name in columns for n in (1, 2)]
    assert all(len(found) == 2 for found in rates.values())


@pytest.mark.soak
def test_server_steps(tmp_path):
    names = ["RingStrategy", "async"]
    results = run("server_steps", tmp_path, "--models", "digits", "--columns", *names)
    assert list(results["digits"]) == names
    rates = [turn["steps_per_second"] for (turn,) in results["digits"].values()]
    assert min(rates) > 0


@pytest.mark.soak
def test_straggler(tmp_path):
    results = run("straggler", tmp_path, "--columns", "sync", "free")
    for case in ("always", "turns"):
        (turn,) = results[case]["sync"]
        assert [rank["steps"] for rank in turn] == [4, 4, 4]
        # In step with the one that sleeps 0.1 s.
        assert all(rank["seconds"] > 0.4 for rank in turn)
        (turn,) = results[case]["free"]
        assert sum(rank["steps"] for rank in turn) == 12


@pytest.mark.soak
def test_staleness(tmp_path):
    results = run("staleness", tmp_path, "--strategies", "s=0")["results"]
    (found,) = results["s=0"]["2"]
    assert len(found["accuracy"]) == 2
    assert found["accuracy"][-1] > 0.5


@pytest.mark.soak
def test_placed_overhead(tmp_path):
    results = run(
        *("placed_overhead", tmp_path, "--models", "cnn", "--columns", "placed")
    )
    assert list(results["cnn"]) == ["plain", "placed"]


@pytest.mark.soak
def test_embedding_rows(tmp_path):
    found = run("embedding_rows", tmp_path, "--columns", "rows", "whole")["steps"]
    table = 20_000 * 64 * 4
    for touched in (10, 100, 1000):
        for rank in found["rows"][str(touched)]:
            for _, sent, _ in rank[1:]:
                assert sent < touched * 260 + 6000
        for rank in found["whole"][str(touched)]:
            for _, sent, received in rank[1:]:
                assert min(sent, received) > table


def test_placement_memory(tmp_path):
    (found,) = run("placement_memory", tmp_path)["models"].values()
    ratio = found["estimated"]["bytes"] / found["measured"]["bytes"]
    assert ratio == pytest.approx(1, abs=0.2)


@pytest.mark.soak
def test_planning_time(tmp_path):
    found = run("planning_time", tmp_path)["seconds"]
    assert {len(seconds) for seconds in found.values()} == {1}


@pytest.mark.soak
def test_pipeline(tmp_path):
    results = run("pipeline", tmp_path)
    assert [len(found) for found in results["seconds"].values()] == [1, 1]
    alone, staged = results["loss"].values()
    assert staged == pytest.approx(alone, rel=1e-4)


@pytest.mark.soak
def test_chief_data(tmp_path):
    results = run("chief_data", tmp_path)
    assert {len(found) for found in results["rates"].values()} == {1}
    assert list(results["compare"]) == ["10"]


@pytest.mark.soak
def test_board_cost(tmp_path):
    (processes,) = run("board_cost", tmp_path)["samples"]
    assert len(processes) == 2
    for (worker,) in processes:
        assert {name: len(found) for name, found in worker["samples"].items()} == {
            "without": 4,
            "counted": 4,
            "row": 4,
        }
