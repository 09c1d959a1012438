"""The recipes of docs/slurm.md under a real Slurm of two nodes, on one machine.

Each daemon runs on a host of `hosts.py`. Needs Debian's packages slurmctld, slurmd,
slurm-client and munge.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from hosts import Hosts
from pace import bound
from places import ROOT
from waiting import wait_until
from workers import python_env

pytestmark = [pytest.mark.soak, pytest.mark.netns, pytest.mark.timeout(1200)]

EXAMPLES = ROOT / "examples"
DIGITS = EXAMPLES / "digits.py"
WEIGHTS = re.compile(r"^rank (\d) of (\d): weights (\w{16})$", re.M)


_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_PROGRAMS = "munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol"
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SchedulerParameters=sched_interval=2,batch_sched_delay=0
KillWait=20
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=normal Nodes=ALL Default=YES PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF
"""


class Slurm(Hosts):
    """Nodes `node1`, `node2`, ..., of 16 cores each, and a controller.

    On exit, also after a failure, every daemon and job is killed.
    """

    def __init__(self, nodes: int, folder: Path) -> None:
        super().__init__(nodes + 1)
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []

    @staticmethod
    def available() -> str | None:
        missing = [name for name in _PROGRAMS if not shutil.which(name, path=_PATH)]
        if missing:
            return f"Slurm isn't installed: {', '.join(missing)} not found"
        return Hosts.available()

    def __enter__(self) -> Slurm:
        super().__enter__()
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> None:
        (self.folder / "state").mkdir()
        nodes = [f"node{i}" for i in range(1, len(self.names))]
        text = "127.0.0.1 localhost\n" + "".join(
            f"{self.address(i)} {node}\n" for i, node in enumerate(nodes, 1)
        )
        for name in self.names:
            # `ip netns exec` shows it as /etc/hosts.
            etc = Path("/etc/netns") / name
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(text)
        lines = [
            f"NodeName={node} NodeAddr={self.address(i)} CPUs=16"
            for i, node in enumerate(nodes, 1)
        ]
        given = {"host": socket.gethostname().partition(".")[0], "folder": self.folder}
        given |= {"address": self.address(0), "nodes": "\n".join(lines)}
        (self.folder / "slurm.conf").write_text(_CONFIGURATION.format(**given))
        # No plugin uses cgroups, and these hosts have none mounted.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid"}
        files |= {"log-file": "log", "seed-file": "seed"}
        self._daemon(
            *("munged", "--foreground", "--force"),
            *(f"--{option}={self.folder}/munge.{end}" for option, end in files.items()),
        )
        wait_until((self.folder / "munge.socket").exists, "munged")
        self._daemon("slurmctld", "-D", host=0)
        for i, node in enumerate(nodes, 1):
            self._daemon("slurmd", "-D", "-N", node, host=i)
        wait_until(
            lambda: self.run("sinfo", "-h", "-o", "%T %D") == f"idle {len(nodes)}\n",
            "idle nodes",
        )

    def _daemon(self, *command: str, host: int | None = None) -> None:
        program = shutil.which(command[0], path=_PATH) or command[0]
        with (self.folder / f"{command[0]}.out").open("ab") as log:
            daemon = subprocess.Popen(
                [*([] if host is None else self.prefix(host)), program, *command[1:]],
                **{"stdin": subprocess.DEVNULL, "stdout": log},
                stderr=subprocess.STDOUT,
                env={**os.environ, "SLURM_CONF": f"{self.folder}/slurm.conf"},
            )
        self._daemons.append(daemon)

    def run(
        self, *command: str, cwd: Path | None = None, env: Mapping[str, str] = {}
    ) -> str:
        done = subprocess.run(
            [*self.prefix(0), *command],
            cwd=cwd,
            env={**os.environ, **env, "SLURM_CONF": f"{self.folder}/slurm.conf"},
            capture_output=True,
            text=True,
            timeout=bound(60),
            check=False,
        )
        return done.stdout if done.returncode == 0 else done.stdout + done.stderr

    def submit(
        self,
        *arguments: str | Path,
        cwd: Path,
        options: Sequence[str] = (),
        env: Mapping[str, str] = {},
    ) -> str:
        text = self.run(
            "sbatch", "--parsable", *options, *map(str, arguments), cwd=cwd, env=env
        )
        if not re.fullmatch(r"\d+\n", text):
            raise OSError(f"sbatch failed: {text}{self.logs()}")
        return text.strip()

    def show(self, job: str) -> dict[str, str]:
        return dict(
            pair.partition("=")[::2]
            for pair in self.run("scontrol", "show", "job", "-o", job).split()
        )

    def wait(self, job: str, state: str = "COMPLETED", within: float = 150.0) -> None:
        def there() -> bool:
            now = self.show(job).get("JobState", "")
            if now in ("FAILED", "TIMEOUT", "NODE_FAIL", "CANCELLED") and now != state:
                raise OSError(f"job {job} is {now}, not {state}")
            return now == state

        wait_until(there, f"job {job} to be {state}", within)

    def logs(self) -> str:
        return "".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}\n"
            for path in sorted(self.folder.glob("*.log"))
        )

    def close(self) -> None:
        super().close()
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait(bound(20.0))
        for name in self.names:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(Path("/etc/netns") / name)


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
