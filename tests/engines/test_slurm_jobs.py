"""The recipes of docs/slurm.md under a real Slurm of two nodes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm import Slurm

from places import ROOT
from waiting import wait_until
from workers import python_env

pytestmark = [pytest.mark.soak, pytest.mark.netns, pytest.mark.timeout(1200)]

EXAMPLES = ROOT / "examples"
DIGITS = EXAMPLES / "digits.py"
WEIGHTS = re.compile(r"^rank (\d) of (\d): weights (\w{16})$", re.M)


class Cluster:
    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm = slurm
        self.output = folder / "output.txt"

    def submit(self, *arguments: str | Path) -> str:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return self.slurm.submit(
            *arguments,
            cwd=self.output.parent,
            options=["--cpus-per-task=1", f"--output={self.output}"],
            env=python_env({"PATH": path}),
        )

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def finish(self, job: str, state: str = "COMPLETED") -> str:
        try:
            self.slurm.wait(job, state, within=240)
        except OSError as error:
            pytest.fail(f"{error}\n{self.text()}\n{self.slurm.logs()}")
        return self.text()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := Slurm.available():
        pytest.skip(reason)
    with Slurm(2, tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture
def cluster(slurm: Slurm, tmp_path: Path) -> Cluster:
    return Cluster(slurm, tmp_path)


def weights_of(output: str, size: int) -> str:
    found = WEIGHTS.findall(output)[-size:]
    assert {(rank, of) for rank, of, _ in found} == {
        (str(rank), str(size)) for rank in range(size)
    }, output
    (digest,) = {digest for *_, digest in found}
    return digest


def test_four_workers_on_two_nodes(cluster: Cluster) -> None:
    job = cluster.submit(EXAMPLES / "slurm.sbatch", DIGITS, "--epochs", "3")
    output = cluster.finish(job)
    weights_of(output, 4)
    assert "weights bit-equal on all workers: True" in output


def test_parameter_servers(cluster: Cluster) -> None:
    script = EXAMPLES / "embedding_ps.py"
    job = cluster.submit(
        *(EXAMPLES / "slurm_servers.sbatch", script, "--epochs", "1"),
        *("--words", "20000"),
    )
    output = cluster.finish(job)
    assert len(re.findall(r"rank \d of 2: \d+ steps, \d+ bytes sent", output)) == 2
    assert re.search(r"test loss \S+, test accuracy ", output)


@pytest.fixture(scope="module")
def uninterrupted(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> str:
    cluster = Cluster(slurm, tmp_path_factory.mktemp("uninterrupted"))
    recipe = EXAMPLES / "slurm_requeue.sbatch"
    return weights_of(
        cluster.finish(cluster.submit(recipe, DIGITS, "--epochs", "40")), 2
    )


@pytest.mark.parametrize("way", ["another job", "signal"])
def test_a_job_continues_after_preemption(
    cluster: Cluster, uninterrupted: str, way: str
) -> None:
    job = cluster.submit(EXAMPLES / "slurm_requeue.sbatch", DIGITS, "--epochs", "40")
    wait_until(lambda: "Epoch 3/" in cluster.text(), "the third epoch", 200)
    if way == "signal":
        # What Slurm itself does before the end of the time.
        cluster.slurm.run("scancel", "--signal=TERM", job)
    else:
        urgent = cluster.slurm.submit(
            *("--wrap", "sleep 1"),
            cwd=cluster.output.parent,
            options=["--partition=urgent", "--nodes=2", "--exclusive"],
        )
        cluster.slurm.wait(urgent)
    output = cluster.finish(job)
    assert cluster.slurm.show(job)["Restarts"] == "1"
    assert "kerasdist: the job is preempted after step" in output
    assert "kerasdist: `fit` continues after step" in output
    assert weights_of(output, 2) == uninterrupted
    folder = cluster.output.parent / ".kerasdist" / f"job-{job}"
    assert list(folder.glob("preempted-*")) == []


def test_the_end_of_a_failed_worker(cluster: Cluster) -> None:
    script = cluster.output.parent / "fail.py"
    script.write_text(
        "import kerasdist\n"
        "strategy = kerasdist.RingStrategy()\n"
        "if strategy.rank == 3:\n"
        "    raise ValueError('no such file')\n"
        "strategy.communicator.barrier()\n"
    )
    job = cluster.submit(EXAMPLES / "slurm.sbatch", script)
    output = cluster.finish(job, "FAILED")
    assert "ValueError: no such file" in output
    assert "WorkerLost: Rank 3 (node2:" in output
